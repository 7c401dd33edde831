"""q8_0: 8-bit integers under one fp16 scale per 32 values.

- Bits: 8 a code, two's complement, −127 … 127; 16 a scale, fp16(amax / 127).
- Bias: none; zero is code 0.
- Specials: a block with a NaN or an infinity has scale 0x7E00 and codes 0, and reads NaN; a
  stored scale of 0 has codes 0; scales saturate at 65504.
- Layout: one byte per value; value = code · scale.

Forbidden: code −128 is never written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvq_codecs.blocks import BLOCK, quotients, round_codes, scaled
from kvq_codecs.spec import Plane, Spec

Array = Any

SPEC = Spec(
    "q8_0",
    (Plane("codes", "uint8"), Plane("scale", "float16", span=BLOCK)),
    source="ggml block_q8_0",
    interchange=("scale", "codes"),
)

LARGEST = 127  # scale = fp16(amax / LARGEST)
LOWEST, HIGHEST = -127, 127  # codes


def encode(xp: Any, rows: Array) -> dict[str, Array]:
    quotient, scale = quotients(xp, rows, LARGEST)
    return {"codes": round_codes(xp, quotient, LOWEST, HIGHEST), "scale": scale}


def decode(xp: Any, planes: Mapping[str, Array], dim: int) -> Array:
    return scaled(xp, planes["codes"].view(xp.int8), planes["scale"])
