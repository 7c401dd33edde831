"""iso4: 4-bit centroids of quaternion-rotated groups under one fp16 scale per 128 values.

- Bits: 4 an index into 16 centroids; 16 a scale, the block's norm over that
  of its centroids.
- Bias: the middle threshold lies above 0, so both zeros have index 7.
- Specials: a scale may be infinite or NaN (0x7E00); norms up to 1e-10 store scale 0 and index 7 for
  every value; a value that is not finite makes the scale so and sets its group's indices to 0.
- Layout: byte j holds value 2j in its low nibble and value 2j + 1 in its high one.
  Each group of four values is multiplied from the left by its quaternion before, and by the
  conjugate after; value = rotated centroid · scale.

Forbidden: other quaternions, absmax scales or midpoint thresholds, which other trees store under
this name; sums in any order but from the first value to the last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvq_codecs.bits import pack, unpack
from kvq_codecs.rotation import BLOCK, dequantize, float_table, quantize
from kvq_codecs.spec import Plane, Spec

Array = Any

SPEC = Spec(
    "iso4",
    (
        Plane("codes", "uint8", span=2),
        Plane("scale", "float16", span=BLOCK),
    ),
    source="ggml ISO4_0 CPU reference",
    interchange=("scale", 2, "codes"),
)

CENTROIDS = float_table(
    *(0xBE3219A8, 0xBDF003EF, 0xBDB759EF, 0xBD8CCFF2),
    *(0xBD51F81A, 0xBD11CE29, 0xBCABF120, 0xBBE3582A),
    *(0x3BE3582A, 0x3CABF120, 0x3D11CE29, 0x3D51F81A),
    *(0x3D8CCFF2, 0x3DB759EF, 0x3DF003EF, 0x3E3219A8),
)
CODE_VALUES = CENTROIDS

# An index is the number of thresholds below the value. Not all are midpoints.
THRESHOLDS = float_table(
    *(0xBE150DD0, 0xBDD3AEEF, 0xBDA214F1, 0xBD75CBFF),
    *(0xBD31E322, 0xBCE7C6B9, 0xBC64C72B, 0x2F800000),
    *(0x3C64C72A, 0x3CE7C6B9, 0x3D31E321, 0x3D75CBFF),
    *(0x3DA214F0, 0x3DD3AEEF, 0x3E150DCF),
)


def encode(xp: Any, rows: Array) -> dict[str, Array]:
    indices, scale = quantize(xp, rows, CENTROIDS, THRESHOLDS)
    return {"codes": pack(xp, indices, 4), "scale": scale}


def decode(xp: Any, planes: Mapping[str, Array], dim: int) -> Array:
    indices = unpack(xp, planes["codes"], 4)
    return dequantize(xp, indices, planes["scale"], CENTROIDS)
