"""A small plan of each family, and its bytes as a person would count them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pool_cases import spec

from kvq_codecs import Spec
from kvq_pools import PoolPlan, dsa, hybrid_swa, mha, mla, qsa


@dataclass(frozen=True)
class Family:
    """`make(layout, width, page_tokens)`, and the bytes of that many pages.

    `nbytes(r, b, pages, tokens)`: r bytes a row in the layout, b a row of bf16; `tokens` a page.
    """

    make: Callable[[Spec, int, int], PoolPlan]
    nbytes: Callable[[int, int, int, int], int]
    needs_groups_of: int = 1  # page_tokens must be a multiple


def _mha(s: Spec, dim: int, page_tokens: int) -> PoolPlan:
    v = spec("bf16")
    return mha(layers=(1, 4, 6), kv_heads=2, head_dim=dim, k=s, v=v, page_tokens=page_tokens)


def _by_layer(s: Spec, dim: int, page_tokens: int) -> PoolPlan:
    b = spec("bf16")
    return mha(
        layers=(1, 4, 6),
        kv_heads=1,
        head_dim=dim,
        k={1: s, 4: b, 6: s},
        v={6: b, 4: s, 1: b},
        page_tokens=page_tokens,
    )


def _hybrid(s: Spec, dim: int, page_tokens: int) -> PoolPlan:
    return hybrid_swa(
        full_layers=(2,),
        window_layers=(0, 1),
        window=20,
        kv_heads=1,
        head_dim=dim,
        k=spec("bf16"),
        v=s,
        page_tokens=page_tokens,
        window_pages=2,
        window_kv_heads=2,
    )


def _all_window(s: Spec, dim: int, page_tokens: int) -> PoolPlan:
    return hybrid_swa(
        full_layers=(),
        window_layers=(0, 5),
        window=20,
        kv_heads=1,
        head_dim=dim,
        k=s,
        v=s,
        page_tokens=page_tokens,
    )


def _mla(s: Spec, dim: int, page_tokens: int) -> PoolPlan:
    return mla(layers=(0, 2), latent_dim=dim - 32, rope_dim=32, latent=s, page_tokens=page_tokens)


def _dsa(s: Spec, dim: int, page_tokens: int) -> PoolPlan:
    return dsa(
        layers=(3, 0, 2),
        index_layers=(2, 3),
        latent_dim=dim - 32,
        rope_dim=32,
        latent=s,
        index_dim=48,
        index=spec("bf16"),
        page_tokens=page_tokens,
    )


def _qsa(s: Spec, dim: int, page_tokens: int) -> PoolPlan:
    return qsa(
        layers=(0, 3),
        kv_heads=1,
        head_dim=dim,
        k=s,
        v=spec("bf16"),
        index=spec("fp16"),
        max_requests=3,
        max_step_tokens=5,
        index_dim=24,
        draft_tokens=1,
        page_tokens=page_tokens,
    )


FAMILIES = {
    "mha": Family(_mha, lambda r, b, p, t: 3 * 2 * (p + 1) * t * (r + b)),
    "by_layer": Family(_by_layer, lambda r, b, p, t: (p + 1) * t * (3 * r + 3 * b)),
    "hybrid_swa": Family(_hybrid, lambda r, b, p, t: ((p + 1) + 2 * 2 * (2 + 1)) * t * (r + b)),
    "all_window": Family(_all_window, lambda r, _, p, t: 2 * (p + 1) * t * 2 * r),
    "mla": Family(_mla, lambda r, _, p, t: 2 * (p + 1) * t * r),
    "dsa": Family(_dsa, lambda r, _, p, t: (p + 1) * t * (3 * r + 2 * 2 * 48)),
    "qsa": Family(
        _qsa,
        # K and V; an index row for 4 tokens; 3 rings of 2 · 4 rows; 5 rows of a step
        lambda r, b, p, t: (
            2 * ((p + 1) * (t * (r + b) + t // 4 * 48) + (3 + 1) * 8 * 48 + (5 + 1) * 48)
        ),
        needs_groups_of=4,
    ),
}
