"""Rows in fp16, to powers of two that bring a request's largest magnitudes into its range.

What a KV head's keys and queries are multiplied by leaves scores what they are, and makes their
largest magnitudes alike; what values are multiplied by is divided out of the result.
"""

from __future__ import annotations

import triton.language as tl

from kvq_attention.triton.jit import jit, kernel
from kvq_attention.triton.partials import narrow

# Rows of peaks, the largest magnitudes of each KV head
KEYS, VALUES, QUERIES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# Of the largest value: sums of many that nearly cancel are no subnormals.
VALUE_EXPONENT = tl.constexpr(8)


@jit
def exponent(peaks, ROW: tl.constexpr, HEADS: tl.constexpr, head):
    """Of the power of two above a peak, within 120 of 0."""
    bits = tl.load(peaks + ROW * HEADS + head).to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum((bits >> 23) - 126, -120), 120)


@jit
def unit(peaks, ROW: tl.constexpr, HEADS: tl.constexpr, head, BACK: tl.constexpr):
    """What a KV head's rows are multiplied by, or BACK, of peaks [3, HEADS]."""
    if ROW == VALUES:
        power = VALUE_EXPONENT - exponent(peaks, VALUES, HEADS, head)
    else:
        apart = (exponent(peaks, KEYS, HEADS, head) - exponent(peaks, QUERIES, HEADS, head)) >> 1
        power = apart if ROW == QUERIES else -apart
    power = tl.minimum(tl.maximum(power, -120), 120)
    if BACK:
        power = -power
    return ((power + 127) << 23).to(tl.float32, bitcast=True)


@jit
def finite(rows):
    """Which of them are neither NaN nor infinite."""
    return tl.abs(rows) < float("inf")


@jit
def within_halves(rows):
    """What fp16 holds: larger numbers become its largest; what is not finite stays."""
    within = tl.minimum(tl.maximum(rows, -65504.0), 65504.0)
    return tl.where(finite(rows), within, rows)


@jit
def raise_peak(peaks, ROW: tl.constexpr, HEADS: tl.constexpr, head, rows):
    """Raise a peak to the largest magnitude of rows; what is not finite does not count."""
    magnitude = tl.where(finite(rows), tl.abs(rows), 0.0)
    top = tl.max(tl.max(magnitude, 1), 0)
    # Of numbers that are not negative, the larger one's bits are.
    tl.atomic_max(peaks + ROW * HEADS + head, top.to(tl.int32, bitcast=True))


@jit
def own_rows(
    rows, stride_token, stride_head, token, head, tokens, DIM: tl.constexpr, WIDTH: tl.constexpr
):
    """Rows [TOKENS, WIDTH] of a head, float32; 0 outside of [0, tokens) and [0, DIM)."""
    column = tl.arange(0, WIDTH)
    there = ((token >= 0) & (token < tokens))[:, None] & (column < DIM)[None, :]
    at = token.to(tl.int64) * stride_token + head.to(tl.int64) * stride_head
    return tl.load(rows + at[:, None] + column[None, :], mask=there, other=0.0).to(tl.float32)


@kernel(do_not_specialize=["before", "tokens", "rows"])
def place(
    q,
    k,
    v,
    target,
    peaks,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    before,
    tokens,
    rows,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    UNITS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Own rows [tokens, heads, DIM] of q, then k, then v, into target [heads, rows, DIM].

    They become rows [before, before + tokens); what is below in k and v is left alone, the others
    are 0. UNITS: times what follows from peaks [3, HEADS], in fp16. HEADS: KV heads, GROUP times as
    many of q. A program takes TOKENS rows of a head.
    """
    head = tl.program_id(1)
    at = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    token = at - before
    column = tl.arange(0, WIDTH)
    keep = (at < rows)[:, None] & (column < DIM)[None, :]
    ASKING: tl.constexpr = HEADS * GROUP
    if head < ASKING:
        given = own_rows(q, q_token, q_head, token, head, tokens, DIM, WIDTH)
        if UNITS:
            given = within_halves(given * unit(peaks, QUERIES, HEADS, head // GROUP, False))
    elif head < ASKING + HEADS:
        given = own_rows(k, k_token, k_head, token, head - ASKING, tokens, DIM, WIDTH)
        if UNITS:
            given = within_halves(given * unit(peaks, KEYS, HEADS, head - ASKING, False))
        keep = keep & (token >= 0)[:, None]
    else:
        value_head = head - (ASKING + HEADS)
        given = own_rows(v, v_token, v_head, token, value_head, tokens, DIM, WIDTH)
        if UNITS:
            given = within_halves(given * unit(peaks, VALUES, HEADS, value_head, False))
        keep = keep & (token >= 0)[:, None]
    pointer = target + ((head.to(tl.int64) * rows + at) * DIM)[:, None] + column[None, :]
    tl.store(pointer, narrow(given, target.dtype.element_ty), mask=keep)
