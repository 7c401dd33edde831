from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvq_codecs.bits import constant
from kvq_codecs.blocks import LARGEST_FP16
from kvq_codecs.spec import Plane, Spec

Array = Any

SPEC = Spec("fp16", (Plane("values", "float16"),), source="IEEE 754 binary16")


def encode(xp: Any, rows: Array) -> dict[str, Array]:
    low, high = constant(xp, rows, -LARGEST_FP16), constant(xp, rows, LARGEST_FP16)
    clamped = xp.minimum(xp.maximum(rows, low), high)
    return {"values": xp.astype(xp.where(xp.isfinite(rows), clamped, rows), xp.float16)}


def decode(xp: Any, planes: Mapping[str, Array], dim: int) -> Array:
    return xp.astype(planes["values"], xp.float32)
