"""fp32: the reference codec; nothing is rounded."""

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
