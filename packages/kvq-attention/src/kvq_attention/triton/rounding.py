"""Rounding on the device: the bytes that the oracle writes, by the same operations.

Divisions are `tl.div_rn` and roots `tl.sqrt_rn`: Triton's own are approximate.
"""

from __future__ import annotations

import numpy as np
import triton.language as tl

from kvq_attention.triton.jit import jit
from kvq_codecs import bits, blocks
from kvq_codecs.formats import bf16
from kvq_codecs.minifloat import Minifloat

INFINITY_BITS = tl.constexpr(blocks.INFINITY_BITS)
MAGNITUDE_BITS = tl.constexpr(blocks.MAGNITUDE_BITS)
LARGEST_FP16 = tl.constexpr(blocks.LARGEST_FP16)
HALF_NAN = tl.constexpr(bits.HALF_NAN)
FLOAT_NAN = tl.constexpr(int(np.float32(np.nan).view(np.int32)))
BF16_LARGEST_BITS = tl.constexpr(bf16.LARGEST_BITS)
BF16_QUIET_BIT = tl.constexpr(bf16.QUIET_BIT)
# Added to a float below 2²², its last bit is 1: the sum's low bits are the rounded integer.
ANCHOR = tl.constexpr(1.5 * 2**23)


def minifloat(kind: Minifloat) -> tuple[int, int, float, int, float]:
    """What the kernels have to know of a kind: see `Minifloat.encode`."""
    return (
        23 - kind.mantissa_bits,
        (127 + 1 - kind.bias) << 23,
        kind.largest,
        kind.sign_shift,
        2.0 ** (127 - kind.bias),
    )


@jit
def magnitude_bits(values):
    """Bits of |x| as int32: they order as the magnitudes do, infinity and NaN above all others."""
    return values.to(tl.int32, bitcast=True) & MAGNITUDE_BITS


@jit
def divide(values, step):
    """values / step, correctly rounded; step is broadcast."""
    return tl.div_rn(values, tl.broadcast_to(step, values.shape))


@jit
def round_codes(quotients, LOWEST: tl.constexpr, HIGHEST: tl.constexpr):
    """Nearest integers, ties to even, within [LOWEST, HIGHEST]: the low byte of each int32.

    No quotient may be NaN. The bits above the low byte are of no use.
    """
    clamped = tl.minimum(tl.maximum(quotients, LOWEST * 1.0), HIGHEST * 1.0)
    return (clamped + ANCHOR).to(tl.int32, bitcast=True)


@jit
def encode_minifloat(values, KIND: tl.constexpr):
    """Codes int32 of a kind of `minifloat`, saturating; no value may be NaN.

    The step of a code is that of its power of two: a float that many times larger is added, whose
    last bit is the step, and leaves the rounded mantissa in the sum's low bits.
    """
    SHIFT: tl.constexpr = KIND[0]
    SMALLEST_NORMAL: tl.constexpr = KIND[1]
    LARGEST: tl.constexpr = KIND[2]
    SIGN_SHIFT: tl.constexpr = KIND[3]
    sign = (values.to(tl.int32, bitcast=True) >> (31 - SIGN_SHIFT)) & (1 << SIGN_SHIFT)
    magnitude = tl.minimum(tl.abs(values), LARGEST)
    power = tl.maximum(magnitude.to(tl.int32, bitcast=True) & INFINITY_BITS, SMALLEST_NORMAL)
    anchor = power + (SHIFT << 23)
    mantissa = (magnitude + anchor.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - anchor
    return mantissa + ((power - SMALLEST_NORMAL) >> SHIFT) | sign


@jit
def decode_minifloat(codes, KIND: tl.constexpr):
    """Values float32 of codes int32 of a kind of `minifloat` that are neither negative nor NaN.

    The fields of a code are those of a float whose exponent has another bias.
    """
    SHIFT: tl.constexpr = KIND[0]
    BIASES: tl.constexpr = KIND[4]
    return (codes << SHIFT).to(tl.float32, bitcast=True) * BIASES


@jit
def to_half(values, is_nan):
    """float32 → fp16, nearest, ties to even, beyond 65504 as IEEE says; HALF_NAN where `is_nan`.

    The conversion of a NaN differs between devices, so its bits are chosen.
    """
    nearest = values.to(tl.float16).to(tl.int16, bitcast=True)
    return (
        tl.where(is_nan, HALF_NAN, nearest.to(tl.int32)).to(tl.int16).to(tl.float16, bitcast=True)
    )


@jit
def or_nan(values, is_number):
    """float32 values, the positive quiet NaN where they are no numbers."""
    raw = tl.where(is_number, values.to(tl.int32, bitcast=True), FLOAT_NAN)
    return raw.to(tl.float32, bitcast=True)


@jit
def to_bf16(values):
    """float32 → the bits of bf16 as uint16, nearest, ties to even, finite values saturating."""
    raw = values.to(tl.int32, bitcast=True)
    magnitude = raw & MAGNITUDE_BITS
    finite = tl.minimum(magnitude, BF16_LARGEST_BITS)
    nearest = (finite + 0x7FFF + ((finite >> 16) & 1)) >> 16
    special = (magnitude >> 16) | tl.where(magnitude > INFINITY_BITS, BF16_QUIET_BIT, 0)
    codes = tl.where(magnitude < INFINITY_BITS, nearest, special) | ((raw >> 16) & 0x8000)
    return codes.to(tl.uint16)
