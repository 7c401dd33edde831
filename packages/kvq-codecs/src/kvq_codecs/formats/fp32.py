"""fp32: float32 as it came; the reference, nothing is rounded.

- Bits: 32 a value: sign 1, exponent 8, mantissa 23.
- Bias: 127.
- Specials: NaN, infinities and signed zeros stay what they are.
- Layout: one little-endian float32 per value.

Forbidden: nothing; float64 rows round to float32 before any codec sees them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvq_codecs.spec import Plane, Spec

Array = Any

SPEC = Spec("fp32", (Plane("values", "float32"),), source="IEEE 754 binary32")


def encode(xp: Any, rows: Array) -> dict[str, Array]:
    return {"values": rows}


def decode(xp: Any, planes: Mapping[str, Array], dim: int) -> Array:
    return planes["values"]
