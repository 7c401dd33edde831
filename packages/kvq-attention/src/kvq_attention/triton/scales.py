"""Scales of a tile of rows, spread over the rows of a score tile."""

from __future__ import annotations

import triton
import triton.language as tl

SCORE_ROWS = tl.constexpr(16)  # rows of a score tile: what one tensor-core product holds


@triton.jit
def load_scales(scale, rows, mask, block, COUNT: tl.constexpr, WORD: tl.constexpr):
    """Scale of each token for each score row's block: float32 [16 or 1, tokens].

    rows: int64 [tokens], offsets in items of `scale`; block: int32 [16]. COUNT scales a token;
    WORD = they are read as one integer, whose 16-bit fields are the fp16 scales. What is masked
    is 0.
    """
    if COUNT == 1:
        return tl.load(scale + rows, mask=mask, other=0.0).to(tl.float32)[None, :]
    if WORD:
        word = tl.load(scale + rows, mask=mask, other=0)
        # One word a token is fetched ahead with the tile; a load a block would not be.
        field = (word[None, :] >> (block * 16).to(word.dtype)[:, None]).to(tl.int16)
        return field.to(tl.float16, bitcast=True).to(tl.float32)
    spread = mask[None, :] & (block < COUNT)[:, None]
    return tl.load(scale + rows[None, :] + block[:, None], mask=spread, other=0.0).to(tl.float32)


@triton.jit
def sum_blocks(scores, HEADS: tl.constexpr, TOKENS: tl.constexpr):
    """Score rows (block, head) summed over blocks, the sum in each of them."""
    BLOCKS: tl.constexpr = SCORE_ROWS // HEADS
    parts = tl.reshape(scores, (BLOCKS, HEADS, TOKENS))
    total = tl.sum(parts, 0)[None, :, :]
    spread = tl.broadcast_to(total, (BLOCKS, HEADS, TOKENS))
    return tl.reshape(spread, (SCORE_ROWS, TOKENS))
