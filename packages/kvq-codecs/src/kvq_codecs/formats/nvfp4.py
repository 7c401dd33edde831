from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvq_codecs.bits import constant, lookup, pack, unpack
from kvq_codecs.blocks import absmax, divide, row_scale, split
from kvq_codecs.minifloat import E2M1, E2M1_VALUES, E4M3, E4M3_VALUES
from kvq_codecs.spec import Plane, Spec

Array = Any

BLOCK = 16
SPEC = Spec(
    "nvfp4",
    (
        Plane("codes", "uint8", span=2),
        Plane("block_scale", "uint8", span=BLOCK),
        Plane("row_scale", "float32", span=None),
    ),
    source="OCP e2m1 under an e4m3 scale per 16 values and a float32 scale per row",
)


def encode(xp: Any, rows: Array) -> dict[str, Array]:
    scale, finite = row_scale(xp, rows, E4M3.largest * E2M1.largest)
    blocks = split(xp, rows, BLOCK)
    bmax, _ = absmax(xp, blocks)
    alive = finite[..., None]
    six, nan_code = constant(xp, rows, E2M1.largest), constant(xp, rows, 0x7F, "uint8")
    block_codes = E4M3.encode(xp, divide(xp, bmax, six * scale[..., None], alive))
    block_codes = xp.where(alive, block_codes, nan_code)
    step = lookup(xp, E4M3_VALUES, block_codes) * scale[..., None]
    # A step of 0 keeps the signs: x / infinity is a zero of x's sign.
    step = xp.where(step == 0, constant(xp, rows, float("inf")), step)
    codes = E2M1.encode(xp, divide(xp, blocks, step, alive))
    return {
        "codes": pack(xp, xp.reshape(codes, rows.shape), 4),
        "block_scale": block_codes[..., 0],
        "row_scale": scale,
    }


def decode(xp: Any, planes: Mapping[str, Array], dim: int) -> Array:
    step = lookup(xp, E4M3_VALUES, planes["block_scale"]) * planes["row_scale"]
    values = lookup(xp, E2M1_VALUES, unpack(xp, planes["codes"], 4))
    return xp.reshape(split(xp, values, BLOCK) * step[..., None], values.shape)
