"""What the tests of the store kernel share: caches, rows, and the comparison with the oracle."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvq_attention import ops
from kvq_codecs import Encoded

from ..scene import V_GAIN, assert_same_bytes, poisoned, put

Store = Callable[[torch.Tensor, torch.Tensor, Encoded, Encoded, torch.Tensor], None]

PAGES = 6


def by_op(
    k: torch.Tensor, v: torch.Tensor, k_cache: Encoded, v_cache: Encoded, slots: torch.Tensor
) -> None:
    """Store through the op, as users do."""
    ops.store(k, v, k_cache, v_cache, slots, backend="triton")


def rows(count: int, heads: int, dim: int, seed: int = 0) -> torch.Tensor:
    """Gaussian rows float32 [count, heads, dim]."""
    return torch.randn(count, heads, dim, generator=torch.Generator().manual_seed(seed))


def pair(count: int, heads: int, k_dim: int, v_dim: int | None = None) -> list[torch.Tensor]:
    """K and V of a step; V is much larger, so that a swapped scale shows."""
    return [rows(count, heads, k_dim), V_GAIN * rows(count, heads, v_dim or k_dim, 1)]


def some_slots(count: int, num_slots: int, seed: int = 0) -> list[int]:
    """Different slots in no order."""
    order = torch.randperm(num_slots, generator=torch.Generator().manual_seed(seed))
    return order[:count].tolist()


def check(
    k: torch.Tensor,
    v: torch.Tensor,
    codecs: tuple[str, str],
    device: str,
    *,
    slots: list[int] | None = None,
    page_tokens: int = 16,
    pad: int = 0,
    store: Store = by_op,
    place: Callable[[tuple[Encoded, Encoded]], tuple[Encoded, Encoded]] = lambda caches: caches,
) -> None:
    """Store on the device; compare whole caches with the oracle's bytes in the slots."""
    num_slots = PAGES * page_tokens
    if slots is None:
        slots = some_slots(len(k), num_slots)
    heads = k.shape[1]
    compact = [
        poisoned(codec, PAGES, heads, page_tokens, x.shape[2], device, pad)
        for codec, x in zip(codecs, (k, v), strict=True)
    ]
    k_cache, v_cache = place((compact[0], compact[1]))
    store(
        k.to(device),
        v.to(device),
        k_cache,
        v_cache,
        torch.tensor(slots, dtype=torch.int64, device=device),
    )
    kept = [i for i, slot in enumerate(slots) if 0 <= slot < num_slots]
    for got, given in zip((k_cache, v_cache), (k, v), strict=True):
        wanted = poisoned(got.spec.name, PAGES, heads, page_tokens, got.dim, "cpu")
        put(wanted, given[kept], [slots[i] for i in kept])
        assert_same_bytes(got, wanted)
