"""Query rows as the decode kernel multiplies them."""

from __future__ import annotations

import triton.language as tl

from kvq_attention.triton.jit import jit
from kvq_attention.triton.scales import over_blocks


@jit
def load_queries(
    q,
    mask,
    block,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows [16, COLUMNS] float32, split as a tile is.

    q: pointer [16] to each row; block [16]: the block of BLOCK values whose share of the score a
    row is for, other values are 0; BLOCK = 0: all values.
    """
    column = tl.arange(0, COLUMNS)
    keep = mask[:, None] & (column * SPLIT < DIM)[None, :]
    if BLOCK != 0:
        keep = keep & (column[None, :] * SPLIT // BLOCK == block[:, None])
    tiles = ()
    for i in tl.static_range(SPLIT):
        x = tl.load(q[:, None] + column[None, :] * SPLIT + i, mask=keep, other=0.0)
        tiles = tiles + (x.to(tl.float32),)
    return tiles


@jit
def divided(tiles, top, SPLIT: tl.constexpr, DTYPE: tl.constexpr):
    """Rows divided by the power of two of `top`, in DTYPE, and those powers."""
    exponent = (top.to(tl.int32, bitcast=True) >> 23) & 0xFF
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    scaled = ()
    for i in tl.static_range(SPLIT):
        scaled = scaled + ((tiles[i] * inverse[:, None]).to(DTYPE),)
    return scaled, (exponent << 23).to(tl.float32, bitcast=True)


@jit
def largest(tiles, SPLIT: tl.constexpr):
    """The largest magnitude of each row."""
    top = tl.max(tl.abs(tiles[0]), 1)
    for i in tl.static_range(1, SPLIT):
        top = tl.maximum(top, tl.max(tl.abs(tiles[i]), 1))
    return top


@jit
def normalize(tiles, HEADS: tl.constexpr, SPLIT: tl.constexpr, DTYPE: tl.constexpr):
    """Rows in DTYPE, each head's scaled by a power of two to a largest value in [1, 2).

    Scaling is exact; it keeps what float32 and bf16 hold within fp16's range. Returns the rows
    and the powers [16] they were divided by.
    """
    return divided(tiles, over_blocks(largest(tiles, SPLIT), HEADS), SPLIT, DTYPE)


@jit
def to_powers(tiles, SPLIT: tl.constexpr, DTYPE: tl.constexpr):
    """As `normalize`, of any number of rows, each scaled for itself."""
    return divided(tiles, largest(tiles, SPLIT), SPLIT, DTYPE)
