"""What the block formats share: the largest magnitude, the stored scale, the quotients."""

from __future__ import annotations

from typing import Any

from kvq_codecs.bits import half, scalar

Array = Any

BLOCK = 32  # values under one fp16 scale in q8_0, q6_0, q4_0 and fp8_e4m3
SMALLEST_AMAX = 1e-10
LARGEST_FP16 = 65504.0
INFINITY_BITS = 0x7F800000
MAGNITUDE_BITS = 0x7FFFFFFF
NAN = float("nan")


def split(xp: Any, rows: Array, block: int) -> Array:
    """Rows [n, dim] → blocks [n, dim / block, block]."""
    return xp.reshape(rows, (rows.shape[0], rows.shape[1] // block, block))


def absmax(xp: Any, values: Array) -> tuple[Array, Array]:
    """Largest magnitude along the last axis (kept, of length 1), and whether all are finite.

    Magnitudes of floats order as their bits do, NaN above infinity above all finite values, so
    one integer maximum finds the largest and hides nothing.
    """
    top = xp.max(values.view(xp.int32) & MAGNITUDE_BITS, axis=-1, keepdims=True)
    return top.view(xp.float32), top < INFINITY_BITS


def quotients(xp: Any, rows: Array, largest_code: float) -> tuple[Array, Array]:
    """Blocks of 32 over their stored scale, fp16(amax / largest_code).

    Returns the quotients float32 [n, dim / 32, 32] and the scales float16 [n, dim / 32].
    A quotient is +0 where the stored scale is 0 or the block holds a value that is not finite;
    the scale of the latter is NaN.
    """
    blocks = split(xp, rows, BLOCK)
    amax, finite = absmax(xp, blocks)
    exact = xp.minimum(amax / scalar(xp, rows, largest_code), scalar(xp, rows, LARGEST_FP16))
    scale = half(xp, xp.where(finite, exact, scalar(xp, rows, NAN)))
    stored = xp.astype(scale, xp.float32)
    return divide(xp, blocks, stored, stored > 0), scale[..., 0]


def row_scale(xp: Any, rows: Array, largest: float) -> tuple[Array, Array]:
    """max(amax, 1e-10) / largest of each row, NaN where a value is not finite: float32 [n, 1].

    Also returns whether all values of the row are finite.
    """
    amax, finite = absmax(xp, rows)
    scale = xp.maximum(amax, scalar(xp, rows, SMALLEST_AMAX)) / scalar(xp, rows, largest)
    return xp.where(finite, scale, scalar(xp, rows, NAN)), finite


def divide(xp: Any, values: Array, step: Array, alive: Array) -> Array:
    """`values / step` where `alive`, +0 elsewhere."""
    zero, one = scalar(xp, values, 0.0), scalar(xp, values, 1.0)
    return xp.where(alive, values, zero) / xp.where(alive, step, one)


def round_codes(xp: Any, quotient: Array, low: int, high: int) -> Array:
    """Nearest integers, ties to even, clamped as floats: int8 as uint8 [n, dim]."""
    lowest, highest = scalar(xp, quotient, low), scalar(xp, quotient, high)
    nearest = xp.minimum(xp.maximum(xp.round(quotient), lowest), highest)
    return xp.reshape(xp.astype(nearest, xp.int8).view(xp.uint8), (quotient.shape[0], -1))


def scaled(xp: Any, codes: Array, scale: Array) -> Array:
    """Codes [n, dim], of any number type, times the scales [n, dim / 32]: float32 [n, dim]."""
    values = split(xp, xp.astype(codes, xp.float32), BLOCK)
    return xp.reshape(values * xp.astype(scale, xp.float32)[..., None], codes.shape)
