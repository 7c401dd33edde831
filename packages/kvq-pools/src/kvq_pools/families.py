"""Plans of the families of models: which layers store what, in which tier."""

from __future__ import annotations

from collections.abc import Iterable

from kvq_codecs import Spec
from kvq_pools.errors import PlanError, whole_number
from kvq_pools.plan import PoolPlan, Slab, Tier


def mha(
    *,
    layers: Iterable[int],
    kv_heads: int,
    head_dim: int,
    k: Spec,
    v: Spec,
    page_tokens: int,
    model_layers: int | None = None,
) -> PoolPlan:
    """Keys and values of every token in one tier, "full": MHA, GQA and MQA.

    Parameters
    ----------
    layers : global ids of the layers that have a paged cache
    kv_heads, head_dim : of one layer (on this rank)
    k, v : byte layouts; they may differ
    page_tokens : tokens of a page
    model_layers : layers of the whole model; an id from it on raises `PlanError`

    Raises `kvq_codecs.RowError` when a codec cannot store head_dim.
    """
    ids = _within(layers, model_layers)
    return PoolPlan(page_tokens, (Tier("full", _kv(ids, kv_heads, head_dim, k, v)),))


def hybrid_swa(
    *,
    full_layers: Iterable[int],
    window_layers: Iterable[int],
    window: int,
    kv_heads: int,
    head_dim: int,
    k: Spec,
    v: Spec,
    page_tokens: int,
    window_pages: int | None = None,
    model_layers: int | None = None,
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
    others : as in `mha`

    Raises `PlanError`, `kvq_codecs.RowError`.
    """
    full, sliding = _within(full_layers, model_layers), _within(window_layers, model_layers)
    if not sliding:
        raise PlanError("hybrid_swa needs window_layers; a model without any is an mha")
    window_slabs = _kv(sliding, kv_heads, head_dim, k, v)
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
    return PoolPlan(
        page_tokens,
        (
            Tier("full", _kv(full, kv_heads, head_dim, k, v)),
            Tier("window", window_slabs, window, fixed_pages=window_pages),
        ),
    )


def _kv(layers: tuple[int, ...], heads: int, dim: int, k: Spec, v: Spec) -> tuple[Slab, Slab]:
    return Slab("k", k, layers, heads, dim), Slab("v", v, layers, heads, dim)


def _within(layers: Iterable[int], model_layers: int | None) -> tuple[int, ...]:
    if not isinstance(layers, Iterable):
        raise PlanError(f"layers must be global layer ids, several of them, got {layers!r}")
    ids = tuple(whole_number("a layer id", layer, 0, PlanError) for layer in layers)
    if model_layers is not None:
        whole_number("model_layers", model_layers, 1, PlanError)
        beyond = [layer for layer in ids if layer >= model_layers]
        if beyond:
            raise PlanError(
                f"layers {beyond} are beyond a model of {model_layers} layers "
                f"(0 … {model_layers - 1})"
            )
    return ids
