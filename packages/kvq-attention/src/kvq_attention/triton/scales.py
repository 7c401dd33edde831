"""Scales of a tile of rows, spread over the rows of a score tile."""

from __future__ import annotations

import triton.language as tl

from kvq_attention.triton.jit import jit
from kvq_attention.triton.words import load

SCORE_ROWS = tl.constexpr(16)  # rows of a score tile: what one tensor-core product holds


@jit
def load_scales(scale, rows, mask, block, COUNT: tl.constexpr, WORD: tl.constexpr):
    """Scale of each token for each score row's block: float32 [16 or 1, tokens].

    rows: int64 [tokens], offsets in items of `scale`; block: int32 [16]. COUNT scales a token;
    WORD = they are read as one integer, whose 16-bit fields are the fp16 scales. What is masked
    is 0; mask None = nothing is.
    """
    if COUNT == 1:
        spread = load(scale + rows, mask)[None, :].to(tl.float32)
    elif WORD:
        # One word a token is fetched ahead with the tile; a load a block would not be.
        word = load(scale + rows, mask)
        field = (word[None, :] >> (block * 16).to(word.dtype)[:, None]).to(tl.int16)
        spread = field.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        inside = (block < COUNT)[:, None]
        if mask is not None:
            inside = inside & mask[None, :]
        spread = load(scale + rows[None, :] + block[:, None], inside).to(tl.float32)
    return spread


@jit
def sum_blocks(scores, HEADS: tl.constexpr, TOKENS: tl.constexpr):
    """Score rows (block, head) summed over blocks, the sum in each of them."""
    BLOCKS: tl.constexpr = SCORE_ROWS // HEADS
    parts = tl.reshape(scores, (BLOCKS, HEADS, TOKENS))
    total = tl.sum(parts, 0)[None, :, :]
    spread = tl.broadcast_to(total, (BLOCKS, HEADS, TOKENS))
    return tl.reshape(spread, (SCORE_ROWS, TOKENS))


@jit
def over_blocks(values, HEADS: tl.constexpr):
    """The largest of a head's rows (block, head), in each of them: [16]."""
    if HEADS == SCORE_ROWS:
        return values
    else:
        BLOCKS: tl.constexpr = SCORE_ROWS // HEADS
        largest = tl.max(tl.reshape(values, (BLOCKS, HEADS)), 0)
        spread = tl.broadcast_to(largest[None, :], (BLOCKS, HEADS))
        return tl.reshape(spread, (SCORE_ROWS,))
