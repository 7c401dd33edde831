"""Operands that rounding to 16 bits may get wrong, and sums of products rounded with integers."""

from __future__ import annotations

import numpy as np

HALVES = np.arange(2**16, dtype=np.uint16)

# Zeros, subnormals, powers of two, their neighbours, the largest, infinities, NaNs.
SPECIAL = np.array(
    [
        *(0x0000, 0x0001, 0x0002, 0x01FF, 0x0200, 0x03FF, 0x0400, 0x0401, 0x07FF, 0x0800),
        *(0x1000, 0x13FF, 0x1400, 0x3BFF, 0x3C00, 0x3C01, 0x3DFF, 0x3E00, 0x4000, 0x63FF),
        *(0x6400, 0x6401, 0x7800, 0x7BFE, 0x7BFF, 0x7C00, 0x7C01, 0x7E00, 0x7FFF),
    ],
    np.uint16,
)
SIGNED = np.concatenate([SPECIAL, SPECIAL | 0x8000])


def _floats() -> np.ndarray:
    """Bits of f32: what 16-bit types hold, what lies midway and just beside it, and any others."""
    exact = HALVES.view(np.float16).astype(np.float32).view(np.uint32)
    of_bf16 = np.arange(0, 2**16, 7, dtype=np.uint32) << 16
    near = [
        base + np.uint32(offset)
        for base, half in ((exact[::3], 0x1000), (of_bf16, 0x8000))
        for offset in (0, 1, half - 1, half, half + 1)
    ]
    tiny = np.linspace(0, 2**-23, 1025, dtype=np.float32).view(np.uint32)
    rest = np.random.default_rng(3).integers(0, 2**32, 20000, np.uint32)
    return np.concatenate([*near, tiny, tiny | 0x80000000, rest]).astype(np.uint32)


FLOATS = _floats()


def pairs() -> tuple[np.ndarray, np.ndarray]:
    """Special halves with each other and with all halves, and halves at random."""
    rng = np.random.default_rng(1)
    every = [np.repeat(SIGNED, SIGNED.size), np.repeat(SIGNED[::3], 2**16 // 8)]
    others = [np.tile(SIGNED, SIGNED.size), np.tile(HALVES[::8], SIGNED[::3].size)]
    return (
        np.concatenate([*every, rng.integers(0, 2**16, 2**16, np.uint16)]),
        np.concatenate([*others, rng.integers(0, 2**16, 2**16, np.uint16)]),
    )
