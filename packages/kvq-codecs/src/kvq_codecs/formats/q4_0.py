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


def encode(xp: Any, rows: Array) -> dict[str, Array]:
    quotient, scale = quotients(xp, rows, 8)
    return {"codes": pack(xp, round_codes(xp, quotient, -8, 7) & 15, 4), "scale": scale}


def decode(xp: Any, planes: Mapping[str, Array], dim: int) -> Array:
    codes = unpack(xp, planes["codes"], 4)
    return scaled(xp, ((codes ^ 8) - 8).view(xp.int8), planes["scale"])
