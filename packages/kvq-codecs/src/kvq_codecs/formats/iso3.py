"""iso3: 3-bit centroids of quaternion-rotated groups under one fp16 scale per 128 values.

- Bits: 3 an index into 8 centroids; 16 a scale, the block's norm over that
  of its centroids.
- Bias: the middle threshold lies above 0, so both zeros have index 3.
- Specials: a scale may be infinite or NaN (0x7E00); norms up to 1e-10 store scale 0 and index 3 for
  every value; a value that is not finite makes the scale so and sets its group's indices to 0.
- Layout: `low` byte j holds the low two bits of values 4j … 4j + 3 at bits 0, 2, 4, 6; `high`
  byte k the top bit of value 8k + i at bit i.
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
    "iso3",
    (
        Plane("low", "uint8", span=4),
        Plane("high", "uint8", span=8),
        Plane("scale", "float16", span=BLOCK),
    ),
    source="ggml ISO3_0 CPU reference",
    interchange=("scale", "low", "high"),
)

CENTROIDS = float_table(
    *(0xBE4342EE, 0xBDF151E7, 0xBD8696A2, 0xBCAFCCE2),
    *(0x3CAFCCE2, 0x3D8696A2, 0x3DF151E7, 0x3E4342EE),
)
CODE_VALUES = CENTROIDS

# An index is the number of thresholds below the value. Not all are midpoints.
THRESHOLDS = float_table(
    *(0xBE1DF5F1, 0xBDBBF445, 0xBD3289DB, 0x30800000),
    *(0x3D3289DA, 0x3DBBF444, 0x3E1DF5F0),
)


def encode(xp: Any, rows: Array) -> dict[str, Array]:
    indices, scale = quantize(xp, rows, CENTROIDS, THRESHOLDS)
    return {"low": pack(xp, indices & 3, 2), "high": pack(xp, indices >> 2, 1), "scale": scale}


def decode(xp: Any, planes: Mapping[str, Array], dim: int) -> Array:
    indices = unpack(xp, planes["low"], 2) | (unpack(xp, planes["high"], 1) << 2)
    return dequantize(xp, indices, planes["scale"], CENTROIDS)
