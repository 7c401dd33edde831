"""The softmax of decode: in base 2, with a reference that moves only where it must."""

from __future__ import annotations

import triton.language as tl

from kvq_attention.triton.jit import jit

# Below every score and finite: exp2(−∞ − LOWEST) is 0, where −∞ − −∞ would be NaN.
LOWEST = tl.constexpr(-3.0e38)
LOG2_E = tl.constexpr(1.4426950408889634)
# How far (log2) scores may exceed the reference before it follows them: while it stays, sums need
# not be scaled, and 2^SLACK is far from the most that fp16 holds.
SLACK = tl.constexpr(8.0)


@jit
def exp2(x, ASM: tl.constexpr):
    """2^x; results below the smallest normal number are 0, which saves two instructions."""
    if ASM >= 80:
        y = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = tl.exp2(x)
    return y


@jit
def log2_sink(sink):
    """A sink's logit in base 2; ∞ is the largest number there is, beside which all else is 0."""
    logit = sink.to(tl.float32) * LOG2_E
    return tl.where(logit > -LOWEST, -LOWEST, logit)


@jit
def soft_cap(scores, softcap):
    """softcap · tanh(scores / softcap)."""
    x = scores / softcap
    # 1 − 2 / (e^2x + 1) cancels near 0, where two terms of the series are enough.
    near = x * (1 - x * x * (1 / 3))
    far = 1 - 2 / (tl.exp2(x * (2 * LOG2_E)) + 1)
    return softcap * tl.where(tl.abs(x) < 1 / 64, near, far)


@jit
def log2_scale(scale):
    """log2 of scales within 0.09, as the bits of a float32 grow; of 0: −60; of ∞ and NaN: 120.

    Good enough to choose a reference by, at a few instructions a number.
    """
    bits = scale.to(tl.int32, bitcast=True)
    bits = tl.minimum(tl.maximum(bits, (127 - 60) << 23), (127 + 120) << 23)
    return bits.to(tl.float32) * 2.0**-23 - 127.0
