"""bf16: the upper half of a float32, rounded to nearest, ties to even.

- Bits: 16 a value: sign 1, exponent 8, mantissa 7.
- Bias: 127.
- Specials: infinities stay, a NaN keeps its sign and stays NaN; finite values beyond
  3.3895e38 saturate to it.
- Layout: one little-endian 16-bit word per value, a uint16 in every array library.

Forbidden: reading the words as fp16. Conversion between the two is a real one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvq_codecs.bits import scalar
from kvq_codecs.blocks import INFINITY_BITS, MAGNITUDE_BITS
from kvq_codecs.spec import Plane, Spec

Array = Any

SPEC = Spec("bf16", (Plane("values", "uint16"),), source="IEEE 754 binary32, upper 16 bits")

LARGEST_BITS = 0x7F7F0000
QUIET_BIT = 0x0040


def encode(xp: Any, rows: Array) -> dict[str, Array]:
    bits = rows.view(xp.int32)
    magnitude = bits & MAGNITUDE_BITS
    finite = xp.minimum(magnitude, scalar(xp, rows, LARGEST_BITS, "int32"))
    nearest = (finite + 0x7FFF + ((finite >> 16) & 1)) >> 16
    special = (magnitude >> 16) | xp.where(
        magnitude > INFINITY_BITS,
        scalar(xp, rows, QUIET_BIT, "int32"),
        scalar(xp, rows, 0, "int32"),
    )
    codes = xp.where(magnitude < INFINITY_BITS, nearest, special) | ((bits >> 16) & 0x8000)
    return {"values": xp.astype(codes, xp.uint16)}


def decode(xp: Any, planes: Mapping[str, Array], dim: int) -> Array:
    return (xp.astype(planes["values"], xp.int32) << 16).view(xp.float32)
