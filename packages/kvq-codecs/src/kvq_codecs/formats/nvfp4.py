"""nvfp4: OCP e2m1 floats under an E4M3FN scale per 16 values and a float32 scale per row.

- Bits: 4 a code: sign 1, exponent 2, mantissa 1; 8 a block_scale, e4m3(bmax / (6 · row_scale));
  32 a row, max(amax, 1e-10) / 2688.
- Bias: 1; the largest code value is 6, the smallest 0.5.
- Specials: a row with a NaN or an infinity has row_scale 0x7FC00000, block_scale 0x7F and
  codes 0, and reads NaN; a zero keeps its sign, also under a block_scale of 0.
- Layout: byte j holds value 2j in its low nibble and value 2j + 1 in its high one;
  value = code value · (block_scale · row_scale).

Forbidden: block scales 0x80 … 0xFF are never written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvq_codecs.bits import lookup, pack, product, scalar, unpack
from kvq_codecs.blocks import absmax, divide, row_scale, split
from kvq_codecs.minifloat import E2M1, E4M3
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

CODE_VALUES = E2M1.values()
SCALE_VALUES = E4M3.values()


def encode(xp: Any, rows: Array) -> dict[str, Array]:
    scale, finite = row_scale(xp, rows, E4M3.largest * E2M1.largest)
    blocks = split(xp, rows, BLOCK)
    bmax, _ = absmax(xp, blocks)
    alive = finite[..., None]
    six, nan_code = scalar(xp, rows, E2M1.largest), scalar(xp, rows, 0x7F, "uint8")
    block_codes = E4M3.encode(xp, divide(xp, bmax, six * scale[..., None], alive))
    block_codes = xp.where(alive, block_codes, nan_code)
    step = lookup(xp, SCALE_VALUES, block_codes) * scale[..., None]
    # A step of 0 keeps the signs: x / infinity is a zero of x's sign.
    step = xp.where(step == 0, scalar(xp, rows, float("inf")), step)
    codes = E2M1.encode(xp, divide(xp, blocks, step, alive))
    return {
        "codes": pack(xp, xp.reshape(codes, rows.shape), 4),
        "block_scale": block_codes[..., 0],
        "row_scale": scale,
    }


def decode(xp: Any, planes: Mapping[str, Array], dim: int) -> Array:
    step = product(xp, lookup(xp, SCALE_VALUES, planes["block_scale"]), planes["row_scale"])
    values = lookup(xp, CODE_VALUES, unpack(xp, planes["codes"], 4))
    return xp.reshape(product(xp, split(xp, values, BLOCK), step[..., None]), values.shape)
