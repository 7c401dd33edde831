"""q4_0: 4-bit integers under one fp16 scale per 32 values.

- Bits: 4 a code, two's complement, −8 … 7; 16 a scale, fp16(amax / 8).
- Bias: none in the codes. No code is +8: a block's largest magnitude is read back exactly if it
  is negative, as 7/8 of itself if it is positive.
- Specials: a block with a NaN or an infinity has scale 0x7E00 and codes 0, and reads NaN; a
  stored scale of 0 has codes 0; scales saturate at 65504.
- Layout: byte j holds value 2j in its low nibble and value 2j + 1 in its high one;
  value = code · scale.

Forbidden: bytes of GGUF's q4_0, which pairs value j with j + 16 and signs its scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvq_codecs.bits import pack, unpack
from kvq_codecs.blocks import BLOCK, quotients, round_codes, scaled
from kvq_codecs.spec import Plane, Spec

Array = Any

SPEC = Spec(
    "q4_0",
    (Plane("codes", "uint8", span=2), Plane("scale", "float16", span=BLOCK)),
    source="kvq (not GGUF's q4_0)",
)

LARGEST = 8  # scale = fp16(amax / LARGEST)
LOWEST, HIGHEST = -8, 7  # codes


def encode(xp: Any, rows: Array) -> dict[str, Array]:
    quotient, scale = quotients(xp, rows, LARGEST)
    return {"codes": pack(xp, round_codes(xp, quotient, LOWEST, HIGHEST) & 15, 4), "scale": scale}


def decode(xp: Any, planes: Mapping[str, Array], dim: int) -> Array:
    codes = unpack(xp, planes["codes"], 4)
    return scaled(xp, ((codes ^ 8) - 8).view(xp.int8), planes["scale"])
