from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvq_codecs.bits import constant
from kvq_codecs.blocks import INFINITY_BITS, MAGNITUDE_BITS
from kvq_codecs.spec import Plane, Spec

Array = Any

SPEC = Spec("bf16", (Plane("values", "uint16"),), source="IEEE 754 binary32, upper 16 bits")

LARGEST_BITS = 0x7F7F0000
QUIET_BIT = 0x0040


def encode(xp: Any, rows: Array) -> dict[str, Array]:
    bits = rows.view(xp.int32)
    magnitude = bits & MAGNITUDE_BITS
    finite = xp.minimum(magnitude, constant(xp, rows, LARGEST_BITS, "int32"))
    nearest = (finite + 0x7FFF + ((finite >> 16) & 1)) >> 16
    special = (magnitude >> 16) | xp.where(
        magnitude > INFINITY_BITS,
        constant(xp, rows, QUIET_BIT, "int32"),
        constant(xp, rows, 0, "int32"),
    )
    codes = xp.where(magnitude < INFINITY_BITS, nearest, special) | ((bits >> 16) & 0x8000)
    return {"values": xp.astype(codes, xp.uint16)}


def decode(xp: Any, planes: Mapping[str, Array], dim: int) -> Array:
    return (xp.astype(planes["values"], xp.int32) << 16).view(xp.float32)
