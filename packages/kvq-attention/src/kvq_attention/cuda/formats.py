"""What the CUDA kernels know of the formats: a header per codec in `source/formats`, named here."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

import kvq_codecs
from kvq_codecs.formats import iso3, iso4

# The C++ type that each codec's header defines.
TYPES = {
    "bf16": "Bf16",
    "fp16": "Fp16",
    "q8_0": "Q8_0",
    "q6_0": "Q6_0",
    "q4_0": "Q4_0",
    "fp8_e4m3": "Fp8E4m3",
    "fp8": "Fp8",
    "nvfp4": "Nvfp4",
    "iso3": "Iso3",
    "iso4": "Iso4",
}

# Those that look codes up in a table of their block's shared memory, beside the ones above,
# and the tables' bytes.
TABLED = {"iso3": ("Iso3Tabled", 16 << 10), "iso4": ("Iso4Tabled", 32 << 10)}

# Those that store rows turned by quaternions.
ROTATED = ("iso3", "iso4")

CONSTANTS = "formats/constants.cuh"  # the header that holds what `constants` says

SCALES = ("scale", "row_scale")  # planes that are applied to scores and probabilities


@dataclass(frozen=True, slots=True)
class Format:
    """A codec as the kernels take it.

    Attributes
    ----------
    type : the C++ type that describes it
    tabled : the C++ type that does so with a table, if there is one
    table_bytes : of that table
    header : path of the header that defines the types, as an `#include` names it
    codes : the plane that words are read from
    second : the plane of the codes' other bits or of their blocks' scales, if there is one
    scale : the plane of the scales that are applied to scores and probabilities, if there is one
    rotated : whether values are stored turned by quaternions
    """

    type: str
    tabled: str | None
    table_bytes: int
    header: str
    codes: str
    second: str | None
    scale: str | None
    rotated: bool

    @property
    def planes(self) -> tuple[str | None, str | None, str | None]:
        """The planes in the kernels' order."""
        return self.codes, self.second, self.scale


@functools.cache
def get(codec: str) -> Format:
    """What the tables above and the codec's spec say; `KeyError` for a codec without a header."""
    type = TYPES[codec]
    names = [plane.name for plane in kvq_codecs.get(codec).spec.planes]
    scale = names.pop() if names[-1] in SCALES else None
    second = names.pop() if len(names) > 1 else None
    (codes,) = names
    tabled, table_bytes = TABLED.get(codec, (None, 0))
    header = f"formats/{codec}.cuh"
    rotated = codec in ROTATED
    return Format(type, tabled, table_bytes, header, codes, second, scale, rotated)


def constants() -> str:
    """The header of what follows from the oracle's tables; the file is compared with it."""
    lines = [
        "// Made from the oracle's tables by kvq_attention.cuda.formats; not to be edited.",
        "#pragma once",
        "",
        '#include "primitives.cuh"',
        "",
        "// Low and high bytes of eight centroids in fp16, as `permute` looks them up.",
        *_byte_tables("ISO3", iso3.CENTROIDS),
        *_byte_tables("ISO4", iso4.CENTROIDS[:8]),
    ]
    return "\n".join(lines) + "\n"


def _byte_tables(name: str, values: Any) -> list[str]:
    """Two words for entries 0 … 3 and 4 … 7 of the low bytes, two of the high ones."""
    octets = np.asarray(values).astype("<f2").view(np.uint8).reshape(8, 2)
    words = np.ascontiguousarray(octets.T).view("<u4")
    return [
        f"constexpr u32 {name}_{half}_{4 * i} = 0x{word:08X};"
        for half, row in zip(("LOW", "HIGH"), words, strict=True)
        for i, word in enumerate(row)
    ]
