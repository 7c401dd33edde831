"""Operands that rounding to 16 bits may get wrong, and sums of products rounded with integers."""

from __future__ import annotations

from functools import cache

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


@cache
def fused_halves() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Halves a, b, c and the bits of a * b + c."""
    rng = np.random.default_rng(2)
    random = rng.integers(0, 2**16, (3, 20000), np.uint16)
    special = rng.choice(SIGNED, (3, 20000))
    # Products that lie midway between halves, and addends far below that break the tie.
    ties = np.stack(
        [
            0x3C01 + 2 * rng.integers(0, 512, 4000, np.uint16),
            np.full(4000, 0x3E00, np.uint16),
            rng.choice(np.array([0x0000, 0x0001, 0x8001, 0x0003, 0x8400], np.uint16), 4000),
        ]
    )
    a, b, c = np.concatenate([random, special, ties], 1)
    found = [_fused(*map(int, three)) for three in zip(a, b, c, strict=True)]
    return a, b, c, np.array(found, np.uint16)


def _fused(a: int, b: int, c: int) -> int:
    x, y, z = (float(np.uint16(v).view(np.float16)) for v in (a, b, c))
    if not np.isfinite([x, y, z]).all():
        with np.errstate(invalid="ignore"):
            return int((np.float64(x) * y + z).astype(np.float16).view(np.uint16))
    quanta = _units(a) * _units(b) + (_units(c) << 24)  # of 2^-48
    if quanta == 0:
        return 0x8000 if np.signbit(x * y) and np.signbit(z) else 0
    return _rounded(abs(quanta)) | (0x8000 if quanta < 0 else 0)


def _units(half: int) -> int:
    """A finite half as a multiple of 2^-24."""
    return int(float(np.uint16(half).view(np.float16)) * 2**24)


def _rounded(quanta: int) -> int:
    """The half nearest to a multiple of 2^-48, ties to even."""
    shift = max(24, quanta.bit_length() - 11)  # what the half's last bit stands for
    whole, rest = quanta >> shift, quanta & ((1 << shift) - 1)
    whole += rest * 2 > 1 << shift or (rest * 2 == 1 << shift and whole & 1)
    return min((shift - 24) * 1024 + whole, 0x7C00)
