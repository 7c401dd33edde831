from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvq_codecs.bits import lookup
from kvq_codecs.blocks import divide, row_scale
from kvq_codecs.minifloat import E4M3, E4M3_VALUES
from kvq_codecs.spec import Plane, Spec

Array = Any

SPEC = Spec(
    "fp8",
    (Plane("codes", "uint8"), Plane("row_scale", "float32", span=None)),
    source="OCP 8-bit floating point (E4M3FN), scaled per row",
)


def encode(xp: Any, rows: Array) -> dict[str, Array]:
    scale, finite = row_scale(xp, rows, E4M3.largest)
    return {"codes": E4M3.encode(xp, divide(xp, rows, scale, finite)), "row_scale": scale}


def decode(xp: Any, planes: Mapping[str, Array], dim: int) -> Array:
    return lookup(xp, E4M3_VALUES, planes["codes"]) * planes["row_scale"]
