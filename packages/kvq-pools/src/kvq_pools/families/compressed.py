"""The family whose index keys are compressed: one for a group of tokens."""

from __future__ import annotations

from collections.abc import Iterable

from kvq_codecs import Spec
from kvq_pools.errors import PlanError, whole_number
from kvq_pools.families.layers import Layout, check_index, layer_ids
from kvq_pools.families.plain import mha
from kvq_pools.plan import PoolPlan, Slab, Tier


def qsa(
    *,
    layers: Iterable[int],
    kv_heads: int,
    head_dim: int,
    k: Layout,
    v: Layout,
    index: Spec,
    max_requests: int,
    max_step_tokens: int,
    index_dim: int = 128,
    ratio: int = 4,
    draft_tokens: int = 0,
    page_tokens: int = 64,
    model_layers: int | None = None,
) -> PoolPlan:
    """Keys, values and an index key per `ratio` tokens, with what unfinished groups need.

    Tier "full" holds slabs k, v and index_k; the index row of a slot is slot // ratio. Tier
    "ring" (slab index_pending) holds a request's last raw index keys, tier "scratch" (slab
    index_scratch) a row for each token of a step, where tokens write that close no group.

    Parameters
    ----------
    index : bf16 or fp16, whatever k and v are
    max_requests : most requests that run at once, one ring each
    max_step_tokens : most tokens computed in a step, over all requests
    index_dim : values of an index key
    ratio : tokens of a group; page_tokens must be a multiple of it
    draft_tokens : tokens that may be computed beyond the last accepted one, and taken back
    others : as in `mha`

    Raises `PlanError`, `kvq_codecs.RowError`.
    """
    for name, count in (
        ("max_requests", max_requests),
        ("max_step_tokens", max_step_tokens),
        ("ratio", ratio),
    ):
        whole_number(name, count, 1, PlanError)
    whole_number("draft_tokens", draft_tokens, 0, PlanError)
    check_index(index)
    ids = layer_ids(layers, model_layers)
    kv = mha(layers=ids, kv_heads=kv_heads, head_dim=head_dim, k=k, v=v, page_tokens=page_tokens)
    index_k = Slab("index_k", index, ids, 1, index_dim, slots_per_row=ratio)
    # whole groups, so that a slot of the ring is position % its length
    ring_slots = ratio * -(-(ratio + draft_tokens) // ratio)
    return PoolPlan(
        page_tokens,
        (
            Tier("full", (*kv.tier("full").slabs, index_k)),
            Tier(
                "ring",
                (Slab("index_pending", index, ids, 1, index_dim),),
                fixed_pages=max_requests,
                scope="request",
                page_slots=ring_slots,
            ),
            Tier(
                "scratch",
                (Slab("index_scratch", index, ids, 1, index_dim),),
                fixed_pages=max_step_tokens,
                scope="step",
                page_slots=1,
            ),
        ),
    )
