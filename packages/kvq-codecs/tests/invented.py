"""A codec that the package does not have: 5-bit integers, 32 a block, as a user would add one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvq_codecs import Codec, Plane, Spec
from kvq_codecs.bits import pack, unpack
from kvq_codecs.blocks import BLOCK, quotients, round_codes, scaled

SPEC = Spec(
    "invented_5",
    (
        Plane("low", "uint8", span=2),
        Plane("high", "uint8", span=8),
        Plane("scale", "float16", span=BLOCK),
    ),
    source="a test",
)


def encode(xp: Any, rows: Any) -> dict[str, Any]:
    quotient, scale = quotients(xp, rows, 15)
    codes = round_codes(xp, quotient, -15, 15)
    low, high = pack(xp, codes & 15, 4), pack(xp, (codes >> 4) & 1, 1)
    return {"low": low, "high": high, "scale": scale}


def decode(xp: Any, planes: Mapping[str, Any], dim: int) -> Any:
    codes = unpack(xp, planes["low"], 4) | (unpack(xp, planes["high"], 1) << 4)
    return scaled(xp, ((codes ^ 16) - 16).view(xp.int8), planes["scale"])


CODEC = Codec(SPEC, encode, decode)
