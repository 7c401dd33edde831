"""One tile of tokens: its scores, probabilities and what they add to a piece's sums."""

from __future__ import annotations

import triton.language as tl

from kvq_attention.triton.jit import jit
from kvq_attention.triton.paging import find_pages, rows_of
from kvq_attention.triton.partials import scale_rows
from kvq_attention.triton.scales import SCORE_ROWS, load_scales, sum_blocks
from kvq_attention.triton.softmax import LOG2_E, LOWEST, SLACK, exp2, log2_scale, soft_cap


@jit
def nothing_yet(TOKENS: tl.constexpr, SPLIT: tl.constexpr, COLUMNS: tl.constexpr):
    """The state before the first tile: reference, weight, sums, tokens without a page."""
    sums = ()
    for _ in tl.static_range(SPLIT):
        sums = sums + (tl.zeros([SCORE_ROWS, COLUMNS], tl.float32),)
    top = tl.full([SCORE_ROWS], LOWEST, tl.float32)
    return top, tl.zeros([SCORE_ROWS], tl.float32), sums, tl.zeros([TOKENS], tl.int32)


@jit
def scores_of(queries, keys, TOKENS: tl.constexpr, SPLIT: tl.constexpr, DTYPE: tl.constexpr):
    """queries · keysᵀ over all tiles, float32 [16, TOKENS]."""
    scores = tl.zeros([SCORE_ROWS, TOKENS], tl.float32)
    for i in tl.static_range(SPLIT):
        key = tl.trans(keys[i].to(DTYPE))
        scores = tl.dot(queries[i], key, scores, input_precision="tf32x3")
    return scores


@jit
def accumulate(sums, weights, values, SPLIT: tl.constexpr, DTYPE: tl.constexpr):
    """sums + weights · values, tile by tile."""
    added = ()
    for i in tl.static_range(SPLIT):
        value = values[i].to(DTYPE)
        added = added + (tl.dot(weights, value, sums[i], input_precision="tf32x3"),)
    return added


@jit
def step(
    at,
    state,
    asking,
    power,
    block,
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
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ASM: tl.constexpr,
):
    """The state with the tokens from `at` on added to it.

    asking, power: the rows' queries and what scores are multiplied by; position [16]: the rows'
    own; tokens in [lowest, last) are looked at. Not MASKED: all of the tile is, by every row.
    """
    top, weight, sums, lost = state
    token = at + tl.arange(0, TOKENS)
    inside = None
    if MASKED:
        inside = (token >= lowest) & (token < last)
    page, missing = find_pages(table, token, inside, num_pages, PAGE)
    lost |= missing.to(tl.int32)

    a_rows = rows_of(page, token, head, k_pages, K_STRIDES, 0, PAGE)
    b_rows = rows_of(page, token, head, k_pages, K_STRIDES, 1, PAGE)
    keys = LOAD_K(k_planes[0], k_planes[1], a_rows, b_rows, inside, K_DIM, K_COLUMNS, ASM)
    scores = scores_of(asking, keys, TOKENS, K_SPLIT, K_DTYPE)
    if K_SCALES > 0:
        s_rows = rows_of(page, token, head, k_pages, K_STRIDES, 2, PAGE)
        scores *= load_scales(k_planes[2], s_rows, inside, block, K_SCALES, K_WORD)
        if K_SCALES > 1:
            scores = sum_blocks(scores, HEADS, TOKENS)
    factor = tl.broadcast_to(power[:, None], scores.shape)
    if SOFTCAP:
        scores = soft_cap(scores * factor, softcap)
        factor = tl.full(scores.shape, LOG2_E, tl.float32)
    if MASKED:
        seen = inside[None, :] & (token[None, :] <= position[:, None])
        if WINDOW:
            seen &= token[None, :] > (position - window)[:, None]

    a_rows = rows_of(page, token, head, v_pages, V_STRIDES, 0, PAGE)
    b_rows = rows_of(page, token, head, v_pages, V_STRIDES, 1, PAGE)
    values = LOAD_V(v_planes[0], v_planes[1], a_rows, b_rows, inside, V_DIM, V_COLUMNS, ASM)
    if V_SCALES > 0:
        s_rows = rows_of(page, token, head, v_pages, V_STRIDES, 2, PAGE)
        scale = load_scales(v_planes[2], s_rows, inside, block, V_SCALES, V_WORD)
        # The reference is near the largest probability × scale, so that this product is of the
        # order of 1: fp16 holds it, and what fp16 rounds off is small beside it.
        heights = tl.fma(scores, factor, tl.broadcast_to(log2_scale(scale), scores.shape))
    else:
        heights = scores * factor
    if MASKED:
        heights = tl.where(seen, heights, float("-inf"))
    high = tl.max(heights, 1)
    new_top = tl.where(high > top + SLACK, high, top)
    if tl.max((new_top != top).to(tl.int32), 0) > 0:
        fade = exp2(top - new_top, ASM)
        weight *= fade
        sums = scale_rows(sums, fade, V_SPLIT)
    # Which products and sums are joined is said: a compiler would decide it by what is MASKED.
    exponents = tl.fma(scores, factor, tl.broadcast_to(-new_top[:, None], scores.shape))
    if MASKED:
        exponents = tl.where(seen, exponents, float("-inf"))
    weights = exp2(exponents, ASM)
    weight += tl.sum(weights, 1)
    if V_SCALES > 0:
        weights *= scale
        if MASKED:
            weights = tl.where(seen, weights, 0.0)  # 0 · NaN
    sums = accumulate(sums, weights.to(V_DTYPE), values, V_SPLIT, V_DTYPE)
    return new_top, weight, sums, lost
