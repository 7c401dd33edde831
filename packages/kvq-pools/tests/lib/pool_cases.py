"""Prices that a table states, not our code; a codec that no package knows; small plans."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import kvq_codecs
from kvq_codecs import Plane, Spec
from kvq_pools import PoolPlan, hybrid_swa, mha

PAGE_TOKENS = (1, 16, 32, 64, 128)
HEAD_DIMS = (64, 80, 96, 128, 192, 256, 512, 576)

# Bytes of one row of D values, and what D must be a multiple of.
PRICES: dict[str, tuple[int, Callable[[int], int]]] = {
    "fp32": (1, lambda d: 4 * d),
    "bf16": (1, lambda d: 2 * d),
    "fp16": (1, lambda d: 2 * d),
    "q8_0": (32, lambda d: d + d // 16),
    "fp8_e4m3": (32, lambda d: d + d // 16),
    "fp8": (1, lambda d: d + 4),
    "q6_0": (32, lambda d: 3 * d // 4 + d // 16),
    "nvfp4": (16, lambda d: d // 2 + d // 16 + 4),
    "q4_0": (32, lambda d: d // 2 + d // 16),
    "iso4": (128, lambda d: 66 * d // 128),
    "iso3": (128, lambda d: 50 * d // 128),
    "five": (48, lambda d: 5 * d // 8 + d // 24 + 4),
}

# Five bits a value in 16-bit words, blocks of 48, a float32 of the whole row: unlike any codec.
FIVE = Spec(
    "five",
    (
        Plane("words", "uint16", items=5, span=16),
        Plane("scale", "float16", span=48),
        Plane("offset", "float32", span=None),
    ),
    source="these tests",
)


def spec(name: str) -> Spec:
    """Layout by name, the invented one included."""
    return FIVE if name == "five" else kvq_codecs.get(name).spec


def tiny_hybrid(window: int, page_tokens: int, window_pages: int) -> PoolPlan:
    """Layer 0 sees all, layer 1 a window."""
    s = spec("q8_0")
    return hybrid_swa(
        full_layers=(0,),
        window_layers=(1,),
        window=window,
        kv_heads=1,
        head_dim=32,
        k=s,
        v=s,
        page_tokens=page_tokens,
        window_pages=window_pages,
    )


def tiny_all_window(window: int, page_tokens: int) -> PoolPlan:
    """One layer, which slides."""
    s = spec("q8_0")
    return hybrid_swa(
        full_layers=(),
        window_layers=(0,),
        window=window,
        kv_heads=1,
        head_dim=32,
        k=s,
        v=s,
        page_tokens=page_tokens,
    )


def tiny_full(page_tokens: int) -> PoolPlan:
    """One layer, which sees all."""
    s = spec("q8_0")
    return mha(layers=(0,), kv_heads=1, head_dim=32, k=s, v=s, page_tokens=page_tokens)


class Recorder:
    """An `empty` of arrays full of 0xFF, NaN as a float, that remembers what it handed out."""

    def __init__(self) -> None:
        self.buffers: list[np.ndarray] = []

    def __call__(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        buffer = np.empty(shape, dtype)
        buffer.view(np.uint8)[...] = 0xFF
        self.buffers.append(buffer)
        return buffer

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays handed out."""
        return sum(b.size * b.dtype.itemsize for b in self.buffers)
