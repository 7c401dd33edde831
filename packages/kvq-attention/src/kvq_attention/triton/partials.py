"""What a chunk's state comes to: the rows' means and the weight that they have in a merge."""

from __future__ import annotations

import triton.language as tl

from kvq_attention.triton.compat import INTERPRET
from kvq_attention.triton.jit import jit
from kvq_attention.triton.rotation import turn_quad
from kvq_attention.triton.softmax import LOWEST


@jit
def scale_rows(tiles, factor, SPLIT: tl.constexpr):
    """tiles · factor [16], tile by tile."""
    scaled = ()
    for i in tl.static_range(SPLIT):
        scaled = scaled + (tiles[i] * factor[:, None],)
    return scaled


@jit
def finish(state, broken, SPLIT: tl.constexpr, FACTOR: tl.constexpr):
    """Weighted means, tile by tile, and log2 of the rows' weights, [16].

    log2 is −∞ for a row that saw nothing. All is NaN where a page was needed that is not there:
    never the numbers of another request.
    """
    top, weight, sums, lost = state
    empty = weight == 0
    weight = tl.where(empty, 1.0, weight)
    share = FACTOR / weight
    lse = tl.where(empty, float("-inf"), top + tl.log2(weight))
    broken = broken | (tl.max(lost, 0) > 0)
    share = tl.where(broken, float("nan"), share)
    lse = tl.where(broken, float("nan"), lse)
    return scale_rows(sums, share, SPLIT), lse


@jit
def join_sink(means, lse, sink, SPLIT: tl.constexpr):
    """Means of rows that share their weight with a sink (log2), as the merge joins one."""
    top = tl.maximum(tl.maximum(lse, LOWEST), sink)
    share = tl.exp2(lse - top)
    return scale_rows(scale_rows(means, share, SPLIT), 1.0 / (tl.exp2(sink - top) + share), SPLIT)


@jit
def narrow(values, DTYPE: tl.constexpr):
    """float32 values in DTYPE, rounded to nearest even; the interpreter truncates to bf16."""
    if INTERPRET and tl.bfloat16 == DTYPE:
        bits = values.to(tl.int32, bitcast=True)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        bits = tl.where(values == values, rounded, bits | 0x400000)
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return values.to(DTYPE)


@jit
def store_rows(
    tiles,
    target,
    asked,
    block,
    turns,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    SCALES: tl.constexpr,
    ROTATED: tl.constexpr,
):
    """Store what rows (block, head) hold of their block; target: pointers [16] to whole rows.

    ROTATED: turn it back first.
    """
    column = tl.arange(0, COLUMNS)
    keep = asked[:, None] & (column * SPLIT < DIM)[None, :]
    if SCALES > 1:
        keep &= (column[None, :] * SPLIT // (DIM // SCALES)) == block[:, None]
    else:
        keep &= (block == 0)[:, None]
    for i in tl.static_range(SPLIT):
        values = tiles[i]
        if ROTATED:
            # A quad at a time: all of them, before and after, would not fit into registers.
            if i % 4 == 0:
                quad = turn_quad(tiles, turns, i // 4, COLUMNS, SPLIT, True)
            values = quad[i % 4]
        pointer = target[:, None] + (column * SPLIT + i)[None, :]
        tl.store(pointer, narrow(values, pointer.dtype.element_ty), mask=keep)
