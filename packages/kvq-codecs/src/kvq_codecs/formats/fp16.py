"""fp16: IEEE half precision, rounded to nearest, ties to even.

- Bits: 16 a value: sign 1, exponent 5, mantissa 10.
- Bias: 15; subnormals are kept.
- Specials: infinities stay, any NaN is stored as 0x7E00; finite values beyond 65504 saturate
  to it.
- Layout: one little-endian 16-bit word per value.

Forbidden: reading the words as bf16. Conversion between the two is a real one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvq_codecs.bits import half, scalar
from kvq_codecs.blocks import INFINITY_BITS, LARGEST_FP16, MAGNITUDE_BITS, NAN
from kvq_codecs.spec import Plane, Spec

Array = Any

SPEC = Spec("fp16", (Plane("values", "float16"),), source="IEEE 754 binary16")


def encode(xp: Any, rows: Array) -> dict[str, Array]:
    magnitude = rows.view(xp.int32) & MAGNITUDE_BITS
    clamped = rows.clip(-LARGEST_FP16, LARGEST_FP16)
    values = xp.where(magnitude == INFINITY_BITS, rows, clamped)
    values = xp.where(magnitude > INFINITY_BITS, scalar(xp, rows, NAN), values)
    return {"values": half(xp, values)}


def decode(xp: Any, planes: Mapping[str, Array], dim: int) -> Array:
    return xp.astype(planes["values"], xp.float32)
