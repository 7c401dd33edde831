from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvq_codecs.bits import lookup
from kvq_codecs.blocks import BLOCK, quotients, scaled
from kvq_codecs.minifloat import E4M3, E4M3_VALUES
from kvq_codecs.spec import Plane, Spec

Array = Any

SPEC = Spec(
    "fp8_e4m3",
    (Plane("codes", "uint8"), Plane("scale", "float16", span=BLOCK)),
    source="OCP 8-bit floating point (E4M3FN), scaled per 32 values",
)


def encode(xp: Any, rows: Array) -> dict[str, Array]:
    quotient, scale = quotients(xp, rows, E4M3.largest)
    return {"codes": xp.reshape(E4M3.encode(xp, quotient), rows.shape), "scale": scale}


def decode(xp: Any, planes: Mapping[str, Array], dim: int) -> Array:
    return scaled(xp, lookup(xp, E4M3_VALUES, planes["codes"]), planes["scale"])
