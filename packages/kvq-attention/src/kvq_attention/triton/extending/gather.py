"""Packed tokens of one request decoded into rows that lie in one piece, for dense kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_attention.triton.extending.rows import load_past, turn_rows
from kvq_attention.triton.paging import find_pages
from kvq_attention.triton.partials import narrow


@triton.jit
def decode_rows(
    planes,
    pages,
    page,
    token,
    head,
    inside,
    turns,
    LOAD: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    SCALES: tl.constexpr,
    WORD: tl.constexpr,
    STRIDES: tl.constexpr,
    ROTATED: tl.constexpr,
    FACTOR: tl.constexpr,
    PAGE: tl.constexpr,
    ASM: tl.constexpr,
):
    """What a codec decodes tokens to, float32 [tokens, COLUMNS · SPLIT]."""
    rows, factor = load_past(
        planes,
        pages,
        page,
        token,
        head,
        inside,
        LOAD,
        DIM,
        COLUMNS,
        SPLIT,
        SCALES,
        WORD,
        STRIDES,
        PAGE,
        ASM,
    )
    rows = rows.to(tl.float32) * FACTOR
    if SCALES > 0:
        rows *= factor[:, None]
    if ROTATED:
        rows = turn_rows(rows, turns, True, tl.float32)
    return rows


@triton.jit(do_not_specialize=["target_head", "target_side", "num_pages", "first", "last"])
def gather(
    k_planes,
    v_planes,
    target,
    units,
    peaks,
    table,
    turns,
    k_pages,
    v_pages,
    target_side,
    target_head,
    num_pages,
    first,
    last,
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
    K_ROTATED: tl.constexpr,
    V_ROTATED: tl.constexpr,
    K_STRIDES: tl.constexpr,
    V_STRIDES: tl.constexpr,
    K_FACTOR: tl.constexpr,
    V_FACTOR: tl.constexpr,
    HEADS: tl.constexpr,
    UNITS: tl.constexpr,
    MEASURE: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    ASM: tl.constexpr,
):
    """Write tokens [first, last) of K and of V to target [2, HEADS, tokens, DIM], in its dtype.

    table: the request's row of the page table, which has columns for all of them; target_side,
    target_head: elements from side to side and head to head. Values are what the codecs decode,
    rounded once; UNITS: times units [2, HEADS]. A token without a page is NaN. MEASURE: peaks
    [2, HEADS] are raised to the largest magnitudes instead. A program takes TOKENS tokens of one
    head and side.
    """
    head = tl.program_id(1)
    at = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    token = first + at
    inside = token < last
    page, missing = find_pages(table, token, inside, num_pages, PAGE)
    if tl.program_id(2) == 0:
        rows = decode_rows(
            k_planes,
            k_pages,
            page,
            token,
            head,
            inside,
            turns,
            LOAD_K,
            K_DIM,
            K_COLUMNS,
            K_SPLIT,
            K_SCALES,
            K_WORD,
            K_STRIDES,
            K_ROTATED,
            K_FACTOR,
            PAGE,
            ASM,
        )
        finish_rows(
            *(rows, target, units + head, peaks + head, head, at, inside, missing, target_head),
            *(K_DIM, UNITS, MEASURE),
        )
    else:
        rows = decode_rows(
            v_planes,
            v_pages,
            page,
            token,
            head,
            inside,
            turns,
            LOAD_V,
            V_DIM,
            V_COLUMNS,
            V_SPLIT,
            V_SCALES,
            V_WORD,
            V_STRIDES,
            V_ROTATED,
            V_FACTOR,
            PAGE,
            ASM,
        )
        unit, peak = units + HEADS + head, peaks + HEADS + head
        finish_rows(
            *(rows, target + target_side, unit, peak, head, at, inside, missing, target_head),
            *(V_DIM, UNITS, MEASURE),
        )


@triton.jit
def finish_rows(
    rows,
    target,
    unit,
    peak,
    head,
    at,
    inside,
    missing,
    target_head,
    DIM: tl.constexpr,
    UNITS: tl.constexpr,
    MEASURE: tl.constexpr,
):
    """Store decoded tokens of a head, or find the largest of their magnitudes."""
    column = tl.arange(0, rows.shape[1])
    keep = inside[:, None] & (column < DIM)[None, :]
    if MEASURE:
        known = keep & (rows == rows) & (missing == 0)[:, None]
        top = tl.max(tl.max(tl.where(known, tl.abs(rows), 0.0), 1), 0)
        # Of numbers that are not negative, the larger one's bits are.
        tl.atomic_max(peak, top.to(tl.int32, bitcast=True))
    else:
        if UNITS:
            rows = within_halves(rows * tl.load(unit))
        rows = tl.where(missing[:, None], float("nan"), rows)
        row = head.to(tl.int64) * target_head + at.to(tl.int64) * DIM
        values = narrow(rows, target.dtype.element_ty)
        tl.store(target + row[:, None] + column[None, :], values, mask=keep)


@triton.jit
def within_halves(rows):
    """What fp16 holds: larger numbers become its largest, NaN stays."""
    rows = tl.where(rows > 65504.0, 65504.0, rows)
    return tl.where(rows < -65504.0, -65504.0, rows)


@triton.jit(do_not_specialize=["stride_token", "stride_head", "tokens"])
def to_halves(
    rows,
    target,
    units,
    stride_token,
    stride_head,
    tokens,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Rows [tokens, heads, DIM] times units [heads / GROUP] to fp16 [heads, tokens, DIM]."""
    head = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, WIDTH)
    keep = (token < tokens)[:, None] & (column < DIM)[None, :]
    at = token.to(tl.int64) * stride_token + head.to(tl.int64) * stride_head
    given = tl.load(rows + at[:, None] + column[None, :], mask=keep, other=0.0).to(tl.float32)
    given = within_halves(given * tl.load(units + head // GROUP)).to(tl.float16)
    at = (head.to(tl.int64) * tokens + token) * DIM
    tl.store(target + at[:, None] + column[None, :], given, mask=keep)
