"""The step's own tokens, causal among themselves, and the passage of a state from past to own."""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_attention.triton.extending.past import add_values, dots
from kvq_attention.triton.rotation import turn_quad
from kvq_attention.triton.softmax import LOG2_E, LOWEST, exp2, soft_cap

# How far (log2) below the past's whole weight the reference of the own tokens' lies at least: a
# past of large scales has a reference of its own, under which fp16 probabilities would vanish.
BELOW = tl.constexpr(10.0)


@triton.jit
def interleave(even, odd):
    """Columns even[0], odd[0], even[1], …: [rows, 2 · columns]."""
    return tl.reshape(tl.join(even, odd), (even.shape[0], 2 * even.shape[1]))


@triton.jit
def join_tiles(tiles, FIRST: tl.constexpr, STEP: tl.constexpr, SPLIT: tl.constexpr):
    """Tiles FIRST, FIRST + STEP, … of a split row as one, in the row's order."""
    if STEP == SPLIT:
        whole = tiles[FIRST]
    else:
        whole = interleave(
            join_tiles(tiles, FIRST, 2 * STEP, SPLIT),
            join_tiles(tiles, FIRST + STEP, 2 * STEP, SPLIT),
        )
    return whole


@triton.jit
def turn_back(tiles, turns, COLUMNS: tl.constexpr, SPLIT: tl.constexpr):
    """iso's sums as those of values that were never turned."""
    back = ()
    for quad in tl.static_range(SPLIT // 4):
        back = back + turn_quad(tiles, turns, quad, COLUMNS, SPLIT, True)
    return back


@triton.jit
def passed_on(
    state,
    turns,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    ROTATED: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """Reference, weight and sums [rows, values], in the row's order, of a state of the past."""
    top, weight, sums, _lost = state
    if ROTATED:
        sums = turn_back(sums, turns, COLUMNS, SPLIT)
    total = join_tiles(sums, 0, 1, SPLIT) * FACTOR
    empty = weight == 0
    new_top = tl.where(empty, LOWEST, top + tl.log2(tl.where(empty, 1.0, weight)) - BELOW)
    fade = tl.exp2(tl.where(empty, 0.0, top - new_top))
    return new_top, weight * fade, total * fade[:, None]


@triton.jit
def own_step(
    at,
    state,
    asking,
    power,
    query,
    k,
    v,
    k_token,
    v_token,
    last,
    softcap,
    window,
    MASKED: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    K_DTYPE: tl.constexpr,
    V_DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ASM: tl.constexpr,
):
    """The state with the own tokens from `at` on added to it.

    k, v: pointers to the first own token's row; query [ROWS]: the rows' tokens; tokens from `last`
    on are not there. Not MASKED: all of the tile is seen by every row.
    """
    top, weight, total = state
    token = at + tl.arange(0, TOKENS)
    keys = load_own(k, k_token, token, last, MASKED, K_DIM, K_WIDTH)
    scores = dots(asking, (keys,), ROWS, 1, K_DTYPE, ASM) * power[:, None]
    if SOFTCAP:
        scores = soft_cap(scores, softcap) * LOG2_E
    if MASKED:
        seen = (token < last)[None, :] & (token[None, :] <= query[:, None])
        if WINDOW:
            seen = seen & (token[None, :] > (query - window)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    values = load_own(v, v_token, token, last, MASKED, V_DIM, V_WIDTH)
    new_top = tl.maximum(top, tl.max(scores, 1))
    fade = exp2(top - new_top, ASM)
    weights = exp2(scores - new_top[:, None], ASM)
    weight = weight * fade + tl.sum(weights, 1)
    (total,) = add_values((total,), fade, weights, (values,), 1, V_DTYPE, ASM)
    return new_top, weight, total


@triton.jit
def load_own(
    rows, stride, token, last, MASKED: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr
):
    """Rows [tokens, WIDTH] of own tokens, 0 where there are none."""
    column = tl.arange(0, WIDTH)
    pointer = rows + token.to(tl.int64)[:, None] * stride + column[None, :]
    if MASKED:
        there = (token < last)[:, None]
        if WIDTH != DIM:
            there = there & (column < DIM)[None, :]
        tile = tl.load(pointer, mask=there, other=0.0)
    elif WIDTH != DIM:
        tile = tl.load(pointer, mask=(column < DIM)[None, :], other=0.0)
    else:
        tile = tl.load(pointer)
    return tile
