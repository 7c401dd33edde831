"""Families that store a key and a value of every head."""

from __future__ import annotations

from collections.abc import Iterable

from kvq_pools.errors import PlanError
from kvq_pools.families.layers import Layout, check_layout, layer_ids, slabs
from kvq_pools.plan import PoolPlan, Tier


def mha(
    *,
    layers: Iterable[int],
    kv_heads: int,
    head_dim: int,
    k: Layout,
    v: Layout,
    page_tokens: int,
    model_layers: int | None = None,
) -> PoolPlan:
    """Keys and values of every token in one tier, "full": MHA, GQA and MQA.

    Parameters
    ----------
    layers : global ids of the layers that have a paged cache
    kv_heads, head_dim : of one layer (on this rank)
    k, v : byte layouts, which may differ: one for all layers, or one for each layer id
    page_tokens : tokens of a page
    model_layers : layers of the whole model; an id from it on raises `PlanError`

    Raises `PlanError`, and `kvq_codecs.RowError` when a codec cannot store head_dim.
    """
    ids = layer_ids(layers, model_layers)
    _check_layouts(k, v, ids)
    slabs_of_all = slabs("k", k, ids, kv_heads, head_dim) + slabs("v", v, ids, kv_heads, head_dim)
    return PoolPlan(page_tokens, (Tier("full", slabs_of_all),))


def hybrid_swa(
    *,
    full_layers: Iterable[int],
    window_layers: Iterable[int],
    window: int,
    kv_heads: int,
    head_dim: int,
    k: Layout,
    v: Layout,
    page_tokens: int,
    window_pages: int | None = None,
    model_layers: int | None = None,
    window_kv_heads: int | None = None,
    window_head_dim: int | None = None,
) -> PoolPlan:
    """Full-attention layers in tier "full", sliding-window layers in tier "window".

    Parameters
    ----------
    full_layers, window_layers : global layer ids; layers in neither have no paged cache
    window : positions a query of a window layer sees, its own included
    window_pages : usable pages of the window tier, which does not grow with the pool:
        `window_pages_per_request` times the requests that run at once never starves.
        A model whose layers all slide has no other tier that could grow, so there the window
        tier grows with the pool and window_pages must be None.
    window_kv_heads, window_head_dim : of a window layer, where they differ from a full one's
    others : as in `mha`

    Raises `PlanError`, `kvq_codecs.RowError`.
    """
    full, sliding = layer_ids(full_layers, model_layers), layer_ids(window_layers, model_layers)
    if not sliding:
        raise PlanError("hybrid_swa needs window_layers; a model without any is an mha")
    _check_layouts(k, v, full + sliding)
    heads = kv_heads if window_kv_heads is None else window_kv_heads
    dim = head_dim if window_head_dim is None else window_head_dim
    window_slabs = slabs("k", k, sliding, heads, dim) + slabs("v", v, sliding, heads, dim)
    if not full:
        if window_pages is not None:
            raise PlanError(
                f"window_pages is {window_pages}, yet without full_layers the window tier grows "
                "with the pool; leave it None and give the pool its num_pages"
            )
        return PoolPlan(page_tokens, (Tier("window", window_slabs, window),))
    if window_pages is None:
        raise PlanError(
            "window_pages must be given beside full_layers; take "
            "window_pages_per_request(…) times the requests that run at once"
        )
    full_slabs = slabs("k", k, full, kv_heads, head_dim) + slabs("v", v, full, kv_heads, head_dim)
    return PoolPlan(
        page_tokens,
        (
            Tier("full", full_slabs),
            Tier("window", window_slabs, window, fixed_pages=window_pages),
        ),
    )


def _check_layouts(k: Layout, v: Layout, layers: tuple[int, ...]) -> None:
    check_layout("k", k, layers)
    check_layout("v", v, layers)
