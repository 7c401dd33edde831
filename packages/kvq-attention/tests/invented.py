"""A codec that no package has: 5-bit integers, 8 in 5 bytes, one scale per 16 values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvq_codecs import Codec, Plane, Spec

SPAN = 16
LARGEST = 15
SPEC = Spec(
    "invented_5_bit",
    (Plane("codes", "uint8", items=5, span=8), Plane("step", "float32", span=SPAN)),
    source="this test",
)


def encode(xp: Any, rows: Any) -> dict[str, Any]:
    count, dim = rows.shape
    blocks = xp.reshape(rows, (count, dim // SPAN, SPAN))
    amax = xp.max(xp.abs(blocks), axis=-1, keepdims=True)
    # by an array: torch on CUDA multiplies by the reciprocal of a scalar
    step = amax / xp.full_like(amax, LARGEST)
    codes = xp.round(blocks / xp.where(step > 0, step, xp.ones_like(step))) + LARGEST
    codes = xp.reshape(xp.astype(codes, xp.int64), (count, dim // 8, 8))
    word = codes[..., 0]
    for i in range(1, 8):
        word = word | (codes[..., i] << (5 * i))
    packed = xp.stack([(word >> (8 * i)) & 0xFF for i in range(5)], axis=-1)
    packed = xp.reshape(xp.astype(packed, xp.uint8), (count, dim // 8 * 5))
    return {"codes": packed, "step": step[..., 0]}


def decode(xp: Any, planes: Mapping[str, Any], dim: int) -> Any:
    count = planes["codes"].shape[0]
    raw = xp.astype(xp.reshape(planes["codes"], (count, dim // 8, 5)), xp.int64)
    word = raw[..., 0]
    for i in range(1, 5):
        word = word | (raw[..., i] << (8 * i))
    codes = xp.stack([(word >> (5 * i)) & 0x1F for i in range(8)], axis=-1) - LARGEST
    blocks = xp.reshape(xp.astype(codes, xp.float32), (count, dim // SPAN, SPAN))
    return xp.reshape(blocks * planes["step"][..., None], (count, dim))


CODEC = Codec(SPEC, encode, decode)
