"""fp8: OCP E4M3FN floats under one float32 scale per row.

- Bits: 8 a code: sign 1, exponent 4, mantissa 3; 32 a row, max(amax, 1e-10) / 448.
- Bias: 7; the largest code value is 448, the smallest 2⁻⁹.
- Specials: no infinities; a row with a NaN or an infinity has scale 0x7FC00000 and codes 0, and
  reads NaN; a zero keeps its sign.
- Layout: one byte per value; value = code value · row_scale.

Forbidden: codes 0x7F and 0xFF (NaN) are never written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvq_codecs.bits import lookup, product
from kvq_codecs.blocks import divide, row_scale
from kvq_codecs.minifloat import E4M3
from kvq_codecs.spec import Plane, Spec

Array = Any

SPEC = Spec(
    "fp8",
    (Plane("codes", "uint8"), Plane("row_scale", "float32", span=None)),
    source="OCP 8-bit floating point (E4M3FN), scaled per row",
)

CODE_VALUES = E4M3.values()


def encode(xp: Any, rows: Array) -> dict[str, Array]:
    scale, finite = row_scale(xp, rows, E4M3.largest)
    return {"codes": E4M3.encode(xp, divide(xp, rows, scale, finite)), "row_scale": scale}


def decode(xp: Any, planes: Mapping[str, Array], dim: int) -> Array:
    return product(xp, lookup(xp, CODE_VALUES, planes["codes"]), planes["row_scale"])
