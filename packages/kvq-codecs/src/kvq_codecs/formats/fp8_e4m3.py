"""fp8_e4m3: OCP E4M3FN floats under one fp16 scale per 32 values.

- Bits: 8 a code: sign 1, exponent 4, mantissa 3; 16 a scale, fp16(amax / 448).
- Bias: 7; the largest code value is 448, the smallest 2⁻⁹.
- Specials: no infinities; a block with a NaN or an infinity has scale 0x7E00 and codes 0, and
  reads NaN; a stored scale of 0 has codes 0; a zero keeps its sign otherwise.
- Layout: one byte per value; value = code value · scale.

Forbidden: codes 0x7F and 0xFF (NaN) are never written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvq_codecs.bits import lookup
from kvq_codecs.blocks import BLOCK, quotients, scaled
from kvq_codecs.minifloat import E4M3
from kvq_codecs.spec import Plane, Spec

Array = Any

SPEC = Spec(
    "fp8_e4m3",
    (Plane("codes", "uint8"), Plane("scale", "float16", span=BLOCK)),
    source="OCP 8-bit floating point (E4M3FN), scaled per 32 values",
)

CODE_VALUES = E4M3.values()


def encode(xp: Any, rows: Array) -> dict[str, Array]:
    quotient, scale = quotients(xp, rows, E4M3.largest)
    return {"codes": xp.reshape(E4M3.encode(xp, quotient), rows.shape), "scale": scale}


def decode(xp: Any, planes: Mapping[str, Array], dim: int) -> Array:
    return scaled(xp, lookup(xp, CODE_VALUES, planes["codes"]), planes["scale"])
