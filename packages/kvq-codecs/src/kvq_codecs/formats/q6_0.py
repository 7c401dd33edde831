"""q6_0: 6-bit integers under one fp16 scale per 32 values.

- Bits: 6 a code, two's complement, −31 … 31; 16 a scale, fp16(amax / 31).
- Bias: none; zero is code 0.
- Specials: a block with a NaN or an infinity has scale 0x7E00 and codes 0, and reads NaN; a
  stored scale of 0 has codes 0; scales saturate at 65504.
- Layout: `low` byte j holds the low four bits of value 2j in its low nibble and of 2j + 1 in its
  high one; `high` byte k the top two bits of values 4k … 4k + 3 at bits 0, 2, 4, 6;
  value = code · scale.

Forbidden: code −32 is never written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvq_codecs.bits import pack, unpack
from kvq_codecs.blocks import BLOCK, quotients, round_codes, scaled
from kvq_codecs.spec import Plane, Spec

Array = Any

SPEC = Spec(
    "q6_0",
    (
        Plane("low", "uint8", span=2),
        Plane("high", "uint8", span=4),
        Plane("scale", "float16", span=BLOCK),
    ),
    source="kvq",
)

LARGEST = 31  # scale = fp16(amax / LARGEST)
LOWEST, HIGHEST = -31, 31  # codes


def encode(xp: Any, rows: Array) -> dict[str, Array]:
    quotient, scale = quotients(xp, rows, LARGEST)
    codes = round_codes(xp, quotient, LOWEST, HIGHEST)
    low, high = pack(xp, codes & 15, 4), pack(xp, (codes >> 4) & 3, 2)
    return {"low": low, "high": high, "scale": scale}


def decode(xp: Any, planes: Mapping[str, Array], dim: int) -> Array:
    codes = unpack(xp, planes["low"], 4) | (unpack(xp, planes["high"], 2) << 4)
    return scaled(xp, ((codes ^ 32) - 32).view(xp.int8), planes["scale"])
