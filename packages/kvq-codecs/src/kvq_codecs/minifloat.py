"""Small floats: OCP e4m3 and e2m1, the same bytes on every library and device.

Only integer operations and one float addition, whose rounding IEEE 754 fixes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvq_codecs.bits import scalar

Array = Any


@dataclass(frozen=True, slots=True)
class Minifloat:
    """A sign, an exponent, a mantissa, no infinities.

    Attributes
    ----------
    exponent_bits, mantissa_bits : field widths
    bias : exponent bias
    largest : largest finite magnitude, to which encoding saturates
    has_nan : the code with all bits but the sign set is NaN
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: float
    has_nan: bool

    @property
    def sign_shift(self) -> int:
        """Position of the sign bit."""
        return self.exponent_bits + self.mantissa_bits

    def encode(self, xp: Any, values: Array) -> Array:
        """Nearest codes, ties to even, saturating, as uint8; float32 values, none of them NaN."""
        magnitude = xp.minimum(xp.abs(values), scalar(xp, values, self.largest))
        shift = 23 - self.mantissa_bits
        smallest_normal = (127 + 1 - self.bias) << 23
        power = xp.maximum(
            magnitude.view(xp.int32) & 0x7F800000,
            scalar(xp, values, smallest_normal, "int32"),
        )
        # A float 2^shift times the value's power of two has the code's step as its last bit:
        # adding it leaves the rounded mantissa, hidden bit included, in the low bits.
        anchor = power + (shift << 23)
        mantissa = (magnitude + anchor.view(xp.float32)).view(xp.int32) - anchor
        codes = mantissa + ((power - smallest_normal) >> shift)
        sign = (values.view(xp.int32) >> (31 - self.sign_shift)) & (1 << self.sign_shift)
        return xp.astype(codes | sign, xp.uint8)

    def values(self) -> Any:
        """The value of every code, in the order of the codes: NumPy float32 [2 ** width]."""
        magnitudes = []
        for code in range(1 << self.sign_shift):
            exponent, mantissa = divmod(code, 1 << self.mantissa_bits)
            hidden = 1 if exponent else 0
            step = 2.0 ** (max(exponent, 1) - self.bias - self.mantissa_bits)
            magnitudes.append(((hidden << self.mantissa_bits) + mantissa) * step)
        if self.has_nan:
            magnitudes[-1] = float("nan")
        return np.array(magnitudes + [-m for m in magnitudes], np.float32)


E4M3 = Minifloat(exponent_bits=4, mantissa_bits=3, bias=7, largest=448.0, has_nan=True)
E2M1 = Minifloat(exponent_bits=2, mantissa_bits=1, bias=1, largest=6.0, has_nan=False)
