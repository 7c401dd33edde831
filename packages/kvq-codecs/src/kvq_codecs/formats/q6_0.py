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


def encode(xp: Any, rows: Array) -> dict[str, Array]:
    quotient, scale = quotients(xp, rows, 31)
    codes = round_codes(xp, quotient, -31, 31)
    low, high = pack(xp, codes & 15, 4), pack(xp, (codes >> 4) & 3, 2)
    return {"low": low, "high": high, "scale": scale}


def decode(xp: Any, planes: Mapping[str, Array], dim: int) -> Array:
    codes = unpack(xp, planes["low"], 4) | (unpack(xp, planes["high"], 2) << 4)
    return scaled(xp, ((codes ^ 32) - 32).view(xp.int8), planes["scale"])
