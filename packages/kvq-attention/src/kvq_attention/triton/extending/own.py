"""The step's own tokens, causal among themselves, and the passage of a state from past to own."""

from __future__ import annotations

import triton.language as tl

from kvq_attention.triton.extending.past import accumulate, scores_of
from kvq_attention.triton.extending.rows import load_own, turn_rows
from kvq_attention.triton.jit import jit
from kvq_attention.triton.softmax import LOG2_E, LOWEST, exp2, soft_cap

# How far (log2) below the past's whole weight the reference of the own tokens' lies at least: a
# past of large scales has a reference of its own, under which fp16 probabilities would vanish.
BELOW = tl.constexpr(10.0)


@jit
def passed_on(state, turns, ROTATED: tl.constexpr, FACTOR: tl.constexpr):
    """Reference, weight and sums of a state of the past, as the own tokens add to them."""
    top, weight, sums, _lost = state
    if ROTATED:
        sums = turn_rows(sums, turns, True, tl.float32)
    empty = weight == 0
    new_top = tl.where(empty, LOWEST, top + tl.log2(tl.where(empty, 1.0, weight)) - BELOW)
    fade = tl.exp2(tl.where(empty, 0.0, top - new_top))
    return new_top, weight * fade, sums * (fade * FACTOR)[:, None]


@jit
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
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ASM: tl.constexpr,
):
    """The state with the own tokens from `at` on added to it.

    k, v: pointers to the first own token's row; query [ROWS]: the rows' tokens; tokens from `last`
    on are not there. Not MASKED: all of the tile is seen by every row.
    """
    top, weight, sums = state
    token = at + tl.arange(0, TOKENS)
    keys = load_own(k, k_token, token, last, MASKED, K_DIM, K_WIDTH)
    scores = scores_of(asking, keys, K_DTYPE, ASM) * power[:, None]
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
    sums = accumulate(sums * fade[:, None], weights, values, V_DTYPE, ASM)
    return new_top, weight, sums


@jit
def own_steps(
    state,
    asking,
    power,
    query,
    k,
    v,
    k_token,
    v_token,
    lowest_query,
    last,
    softcap,
    window,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    K_DTYPE: tl.constexpr,
    V_DTYPE: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    """The state with own tokens up to `last` added to it; lowest_query: the first row's token."""
    first = last * 0
    whole = tl.minimum(last, lowest_query + 1) // TOKENS * TOKENS
    if WINDOW:
        first = tl.maximum(lowest_query - window + 1, 0) // TOKENS * TOKENS
        whole = first
    for masked in tl.static_range(1 if WINDOW else 0, 2):
        for at in tl.range(
            whole if masked else first,
            last if masked else whole,
            TOKENS,
            num_stages=STAGES if WINDOW or not masked else 1,
        ):
            state = own_step(
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
                masked,
                K_DIM,
                V_DIM,
                K_WIDTH,
                V_WIDTH,
                K_DTYPE,
                V_DTYPE,
                TOKENS,
                WINDOW,
                SOFTCAP,
                ASM,
            )
    return state
