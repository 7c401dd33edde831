"""One tile of the packed past: its rows, scores, probabilities, and what they add to the sums."""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_attention.triton.paging import find_pages, rows_of
from kvq_attention.triton.softmax import LOG2_E, exp2, log2_scale, soft_cap
from kvq_attention.triton.words import load


@triton.jit
def dots(
    queries, keys, ROWS: tl.constexpr, SPLIT: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr
):
    """queries · keysᵀ over all tiles, float32 [ROWS, TOKENS]."""
    PRECISE: tl.constexpr = "tf32x3" if ASM >= 80 else "ieee"
    scores = tl.zeros([ROWS, keys[0].shape[0]], tl.float32)
    for i in tl.static_range(SPLIT):
        key = tl.trans(keys[i].to(DTYPE))
        scores = tl.dot(queries[i], key, scores, input_precision=PRECISE)
    return scores


@triton.jit
def add_values(
    sums, fade, weights, values, SPLIT: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr
):
    """sums · fade + weights · values, tile by tile."""
    PRECISE: tl.constexpr = "tf32x3" if ASM >= 80 else "ieee"
    weights = weights.to(DTYPE)
    added = ()
    for i in tl.static_range(SPLIT):
        value = values[i].to(DTYPE)
        total = sums[i] * fade[:, None]
        added = added + (tl.dot(weights, value, total, input_precision=PRECISE),)
    return added


@triton.jit
def load_rows(
    planes,
    pages,
    page,
    token,
    head,
    inside,
    LOAD: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    SCALES: tl.constexpr,
    WORD: tl.constexpr,
    STRIDES: tl.constexpr,
    PAGE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Tiles of the rows of tokens, and what each row is still to be multiplied by, float32.

    Of several scales a row, the tiles have what they are to a power of two that all of them share:
    fp16 holds that, whatever the scales, and a scale that is no number spoils the factor alone.
    """
    a_rows = rows_of(page, token, head, pages, STRIDES, 0, PAGE)
    b_rows = rows_of(page, token, head, pages, STRIDES, 1, PAGE)
    tiles = LOAD(planes[0], planes[1], a_rows, b_rows, inside, DIM, COLUMNS, ASM)
    factor = tl.zeros([token.shape[0]], tl.float32)
    if SCALES > 0:
        s_rows = rows_of(page, token, head, pages, STRIDES, 2, PAGE)
        if SCALES == 1:
            factor = load(planes[2] + s_rows, inside).to(tl.float32)
        else:
            BLOCKS: tl.constexpr = triton.next_power_of_2(SCALES)
            block = tl.arange(0, BLOCKS)
            if WORD:
                word = load(planes[2] + s_rows, inside)
                field = (word[:, None] >> (block * 16).to(word.dtype)[None, :]).to(tl.int16)
                scale = field.to(tl.float16, bitcast=True).to(tl.float32)
            else:
                there = (block < SCALES)[None, :]
                if inside is not None:
                    there = there & inside[:, None]
                pointer = planes[2] + s_rows[:, None] + block[None, :]
                scale = load(pointer, there).to(tl.float32)
            share, factor = shares(scale)
            tiles = scale_blocks(tiles, share, COLUMNS, SPLIT)
    return tiles, factor


@triton.jit
def shares(scale):
    """Scales [tokens, blocks] to a power of two of each token: fp16, and the powers, float32."""
    bits = scale.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    exponent = tl.max(bits, 1) >> 23
    broken = exponent == 255
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    share = tl.where(broken[:, None], 0.0, scale * inverse[:, None]).to(tl.float16)
    power = (exponent << 23).to(tl.float32, bitcast=True)
    return share, tl.where(broken, float("nan"), power)


@triton.jit
def scale_blocks(tiles, share, COLUMNS: tl.constexpr, SPLIT: tl.constexpr):
    """tiles · share, a share [tokens, blocks] for as many neighbouring columns as a block has."""
    TOKENS: tl.constexpr = share.shape[0]
    BLOCKS: tl.constexpr = share.shape[1]
    SPREAD: tl.constexpr = COLUMNS // BLOCKS
    wide = tl.broadcast_to(share[:, :, None], (TOKENS, BLOCKS, SPREAD))
    wide = tl.reshape(wide, (TOKENS, COLUMNS))
    scaled = ()
    for i in tl.static_range(SPLIT):
        scaled = scaled + (tiles[i].to(tl.float16) * wide,)
    return scaled


@triton.jit
def past_step(
    at,
    state,
    asking,
    power,
    position,
    table,
    head,
    lowest,
    last,
    k_planes,
    v_planes,
    k_pages,
    v_pages,
    num_pages,
    softcap,
    window,
    MASKED: tl.constexpr,
    LOAD_K: tl.constexpr,
    LOAD_V: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_COLUMNS: tl.constexpr,
    V_COLUMNS: tl.constexpr,
    K_SPLIT: tl.constexpr,
    V_SPLIT: tl.constexpr,
    K_DTYPE: tl.constexpr,
    V_DTYPE: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
    K_WORD: tl.constexpr,
    V_WORD: tl.constexpr,
    K_STRIDES: tl.constexpr,
    V_STRIDES: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ASM: tl.constexpr,
):
    """The state with the tokens from `at` on added to it.

    asking, power: the rows' queries and what scores are multiplied by; position [ROWS]: the rows'
    own; tokens in [lowest, last) are looked at. Not MASKED: all of the tile is, by every row.
    """
    top, weight, sums, lost = state
    token = at + tl.arange(0, TOKENS)
    inside = None
    if MASKED:
        inside = (token >= lowest) & (token < last)
    page, missing = find_pages(table, token, inside, num_pages, PAGE)
    lost |= missing.to(tl.int32)
    keys, scale = load_rows(
        k_planes,
        k_pages,
        page,
        token,
        head,
        inside,
        LOAD_K,
        K_DIM,
        K_COLUMNS,
        K_SPLIT,
        K_SCALES,
        K_WORD,
        K_STRIDES,
        PAGE,
        ASM,
    )
    scores = dots(asking, keys, ROWS, K_SPLIT, K_DTYPE, ASM) * power[:, None]
    if K_SCALES > 0:
        scores *= scale[None, :]
    if SOFTCAP:
        scores = soft_cap(scores, softcap) * LOG2_E
    if MASKED:
        seen = inside[None, :]
        if WINDOW:
            seen = seen & (token[None, :] > (position - window)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    values, scale = load_rows(
        v_planes,
        v_pages,
        page,
        token,
        head,
        inside,
        LOAD_V,
        V_DIM,
        V_COLUMNS,
        V_SPLIT,
        V_SCALES,
        V_WORD,
        V_STRIDES,
        PAGE,
        ASM,
    )
    heavy = scores
    if V_SCALES > 0:
        # As in decode: probability × scale is of the order of 1 at most, which fp16 holds.
        heavy += log2_scale(scale)[None, :]
    new_top = tl.maximum(top, tl.max(heavy, 1))
    fade = exp2(top - new_top, ASM)
    weights = exp2(scores - new_top[:, None], ASM)
    weight = weight * fade + tl.sum(weights, 1)
    if V_SCALES > 0:
        weights *= scale[None, :]
        if MASKED:
            weights = tl.where(seen, weights, 0.0)  # 0 · NaN
    sums = add_values(sums, fade, weights, values, V_SPLIT, V_DTYPE, ASM)
    return new_top, weight, sums, lost
