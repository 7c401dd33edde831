"""One tile of the packed past: its scores, its probabilities, and what they add to the sums."""

from __future__ import annotations

import triton.language as tl

from kvq_attention.triton.extending.rows import load_past
from kvq_attention.triton.jit import jit
from kvq_attention.triton.paging import find_pages
from kvq_attention.triton.softmax import LOG2_E, exp2, log2_scale, soft_cap


@jit
def scores_of(queries, keys, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """queries · keysᵀ, float32 [rows, tokens]."""
    PRECISE: tl.constexpr = "tf32x3" if ASM >= 80 else "ieee"
    return tl.dot(queries, tl.trans(keys.to(DTYPE)), input_precision=PRECISE)


@jit
def accumulate(sums, weights, values, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """sums + weights · values."""
    PRECISE: tl.constexpr = "tf32x3" if ASM >= 80 else "ieee"
    return tl.dot(weights.to(DTYPE), values.to(DTYPE), sums, input_precision=PRECISE)


@jit
def unit_of(units, at, head, stride, STRIDES: tl.constexpr, TOKENS: tl.constexpr):
    """Where a dense side has what the rows of a tile are to be multiplied by."""
    tile = (tl.zeros([], tl.int64) + at) // TOKENS
    return units + tile * stride + head.to(tl.int64) * STRIDES[2][0]


@jit
def past_step(
    at,
    state,
    asking,
    power,
    position,
    table,
    dense,
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
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    K_DENSE: tl.constexpr,
    V_DENSE: tl.constexpr,
    ASM: tl.constexpr,
):
    """The state with the tokens from `at` on added to it.

    asking, power: the rows' queries and what scores are multiplied by; position [rows]: the rows'
    own; tokens in [lowest, last) are looked at. Not MASKED: all of the tile is, by every row.
    table: a request's row of the page table. K_DENSE, V_DENSE: that side's pages are of one token
    and follow each other, the one of position p is dense + p; its tiles have units, see `unpack`.
    """
    top, weight, sums, lost = state
    token = at + tl.arange(0, TOKENS)
    inside = None
    if MASKED:
        inside = (token >= lowest) & (token < last)
    page = token + dense
    if not (K_DENSE and V_DENSE):
        page, missing = find_pages(table, token, inside, num_pages, PAGE)
        lost |= missing.to(tl.int32)
    keys, scale = load_past(
        k_planes,
        k_pages,
        token + dense if K_DENSE else page,
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
        1 if K_DENSE else PAGE,
        ASM,
    )
    scores = scores_of(asking, keys, K_DTYPE, ASM) * power[:, None]
    if K_SCALES > 0:
        scores *= scale[None, :]
    # What is added to scores, or caps them, needs the unit in them; else it is a factor later.
    LATE: tl.constexpr = K_DENSE and not SOFTCAP and V_SCALES == 0
    if K_DENSE:
        k_unit = tl.load(unit_of(k_planes[2], at + dense, head, k_pages[2], K_STRIDES, TOKENS))
        if not LATE:
            scores *= k_unit
    if SOFTCAP:
        scores = soft_cap(scores, softcap) * LOG2_E
    if MASKED:
        seen = inside[None, :]
        if WINDOW:
            seen = seen & (token[None, :] > (position - window)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    values, scale = load_past(
        v_planes,
        v_pages,
        token + dense if V_DENSE else page,
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
        1 if V_DENSE else PAGE,
        ASM,
    )
    heavy = scores
    if V_SCALES > 0:
        # As in decode: probability × scale is of the order of 1 at most, which fp16 holds.
        heavy += log2_scale(scale)[None, :]
    high = tl.max(heavy, 1)
    if LATE:
        high *= k_unit
    if V_DENSE:
        unit = tl.load(unit_of(v_planes[2], at + dense, head, v_pages[2], V_STRIDES, TOKENS))
        lift = ((unit.to(tl.int32, bitcast=True) >> 23) - 127).to(tl.float32)
        high += lift
    new_top = tl.maximum(top, high)
    fade = exp2(top - new_top, ASM)
    shift = new_top
    if V_DENSE:
        # Probabilities times the unit, which costs nothing here: the values are to be times it.
        shift -= lift
    if LATE:
        scores *= k_unit
    weights = exp2(scores - shift[:, None], ASM)
    seen_weight = tl.sum(weights, 1)
    if V_DENSE:
        seen_weight *= 1.0 / unit
    weight = weight * fade + seen_weight
    if V_SCALES > 0:
        weights *= scale[None, :]
        if MASKED:
            weights = tl.where(seen, weights, 0.0)  # 0 · NaN
    sums = accumulate(sums * fade[:, None], weights, values, V_DTYPE, ASM)
    return new_top, weight, sums, lost


@jit
def past_steps(
    state,
    asking,
    power,
    position,
    table,
    dense,
    head,
    begin,
    lowest,
    last,
    k_planes,
    v_planes,
    k_pages,
    v_pages,
    num_pages,
    softcap,
    window,
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
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    K_DENSE: tl.constexpr,
    V_DENSE: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    """The state with tokens [lowest, last) on added to it; tiles lie at multiples from `begin`."""
    whole = begin
    if not WINDOW:
        whole = begin + tl.maximum(last - begin, 0) // TOKENS * TOKENS
    # Whole tiles need no masks; in a window there are none.
    for masked in tl.static_range(1 if WINDOW else 0, 2):
        for at in tl.range(
            whole if masked else begin,
            last if masked else whole,
            TOKENS,
            num_stages=STAGES if WINDOW or not masked else 1,
        ):
            state = past_step(
                at,
                state,
                asking,
                power,
                position,
                table,
                dense,
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
                masked,
                LOAD_K,
                LOAD_V,
                K_DIM,
                V_DIM,
                K_COLUMNS,
                V_COLUMNS,
                K_SPLIT,
                V_SPLIT,
                K_DTYPE,
                V_DTYPE,
                K_SCALES,
                V_SCALES,
                K_WORD,
                V_WORD,
                K_STRIDES,
                V_STRIDES,
                PAGE,
                TOKENS,
                WINDOW,
                SOFTCAP,
                K_DENSE,
                V_DENSE,
                ASM,
            )
    return state
