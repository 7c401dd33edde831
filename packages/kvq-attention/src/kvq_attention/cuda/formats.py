"""What the CUDA kernels know of the formats: a header per codec in `source/formats`, named here."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import kvq_codecs

# The C++ type that each codec's header defines.
TYPES = {
    "bf16": "Bf16",
    "fp16": "Fp16",
    "q8_0": "Q8_0",
    "q4_0": "Q4_0",
    "fp8_e4m3": "Fp8E4m3",
    "fp8": "Fp8",
}

SCALES = ("scale", "row_scale")  # planes that are applied to scores and probabilities


@dataclass(frozen=True, slots=True)
class Format:
    """A codec as the kernels take it.

    Attributes
    ----------
    type : the C++ type that describes it
    header : path of the header that defines the type, as an `#include` names it
    codes : the plane that words are read from
    second : the plane of the codes' other bits or of their blocks' scales, if there is one
    scale : the plane of the scales that are applied to scores and probabilities, if there is one
    """

    type: str
    header: str
    codes: str
    second: str | None
    scale: str | None

    @property
    def planes(self) -> tuple[str | None, str | None, str | None]:
        """The planes in the kernels' order."""
        return self.codes, self.second, self.scale


@functools.cache
def get(codec: str) -> Format:
    """What `TYPES` and the codec's spec say; `KeyError` for a codec that has no header."""
    type = TYPES[codec]
    names = [plane.name for plane in kvq_codecs.get(codec).spec.planes]
    scale = names.pop() if names[-1] in SCALES else None
    second = names.pop() if len(names) > 1 else None
    (codes,) = names
    return Format(type, f"formats/{codec}.cuh", codes, second, scale)
