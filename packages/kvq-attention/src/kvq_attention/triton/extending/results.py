"""What a state comes to: means in the output's dtype, or a part's means and its weight."""

from __future__ import annotations

import triton.language as tl

from kvq_attention.triton.jit import jit
from kvq_attention.triton.partials import narrow
from kvq_attention.triton.softmax import LOWEST, log2_sink


@jit
def begin_state(
    kept,
    kept_weights,
    row,
    rows,
    asked,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    RESUMED: tl.constexpr,
):
    """Reference, weight, sums and tokens without a page: of nothing yet, or RESUMED, as kept."""
    if RESUMED:
        column = tl.arange(0, WIDTH)
        there = asked[:, None] & (column < DIM)[None, :]
        top = tl.load(kept_weights + row, mask=asked, other=LOWEST)
        weight = tl.load(kept_weights + rows + row, mask=asked, other=0.0)
        sums = tl.load(kept + row[:, None] * DIM + column[None, :], mask=there, other=0.0)
    else:
        top = tl.full([row.shape[0]], LOWEST, tl.float32)
        weight = tl.zeros([row.shape[0]], tl.float32)
        sums = tl.zeros([row.shape[0], WIDTH], tl.float32)
    return top, weight, sums, tl.zeros([TOKENS], tl.int32)


@jit
def keep_state(state, kept, kept_weights, row, rows, asked, DIM: tl.constexpr):
    """Store a state, bit for bit: sums [rows, DIM], and behind the references the weights."""
    top, weight, sums, _lost = state
    column = tl.arange(0, sums.shape[1])
    there = asked[:, None] & (column < DIM)[None, :]
    tl.store(kept_weights + row, top, mask=asked)
    tl.store(kept_weights + rows + row, weight, mask=asked)
    tl.store(kept + row[:, None] * DIM + column[None, :], sums, mask=there)


@jit
def store_means(state, target, asked, broken, sinks, heads, DIM: tl.constexpr, SINKS: tl.constexpr):
    """Store weighted means; target: pointers [rows] to rows of DIM values; broken: all is NaN.

    A row that saw nothing gives 0. SINKS: each row's head shares its weight with a sink.
    """
    top, weight, total = state
    if SINKS:
        sink = log2_sink(tl.load(sinks + heads, mask=asked, other=0.0))
        new_top = tl.maximum(top, sink)
        fade = tl.exp2(top - new_top)
        total *= fade[:, None]
        weight = weight * fade + tl.exp2(sink - new_top)
    share = 1.0 / tl.where(weight == 0, 1.0, weight)
    share = tl.where(broken, float("nan"), share)
    column = tl.arange(0, total.shape[1])
    means = narrow(total * share[:, None], target.dtype.element_ty)
    keep = asked[:, None] & (column < DIM)[None, :]
    tl.store(target[:, None] + column[None, :], means, mask=keep)


@jit
def store_part(state, target, lse_target, asked, broken, DIM: tl.constexpr):
    """Store weighted means, float32, and log2 of their weight: −∞ for a row that saw nothing."""
    top, weight, total = state
    empty = weight == 0
    weight = tl.where(empty, 1.0, weight)
    lse = tl.where(empty, float("-inf"), top + tl.log2(weight))
    tl.store(lse_target, tl.where(broken, float("nan"), lse), mask=asked)
    share = tl.where(broken, float("nan"), 1.0 / weight)
    column = tl.arange(0, total.shape[1])
    keep = asked[:, None] & (column < DIM)[None, :]
    tl.store(target[:, None] + column[None, :], total * share[:, None], mask=keep)
