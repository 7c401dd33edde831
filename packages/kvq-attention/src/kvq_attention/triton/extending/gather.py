"""Packed tokens of one request decoded into rows that lie in one piece, for dense kernels."""

from __future__ import annotations

import triton.language as tl

from kvq_attention.triton.extending.halves import KEYS, VALUES, unit, within_halves
from kvq_attention.triton.extending.rows import load_past, turn_rows
from kvq_attention.triton.jit import jit, kernel
from kvq_attention.triton.paging import find_pages
from kvq_attention.triton.partials import narrow


@jit
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


@jit
def store_rows(rows, target, above, at, inside, missing, DIM: tl.constexpr):
    """Store decoded tokens of a head; above: rows of target before the head's."""
    column = tl.arange(0, rows.shape[1])
    keep = inside[:, None] & (column < DIM)[None, :]
    rows = tl.where(missing[:, None], float("nan"), rows)
    pointer = target + ((above + at) * DIM)[:, None] + column[None, :]
    tl.store(pointer, narrow(rows, target.dtype.element_ty), mask=keep)


@kernel(do_not_specialize=["side_rows", "head_rows", "table_row", "num_pages", "first", "last"])
def gather(
    k_planes,
    v_planes,
    target,
    peaks,
    table,
    turns,
    k_pages,
    v_pages,
    side_rows,
    head_rows,
    table_row,
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
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    ASM: tl.constexpr,
):
    """Write tokens [first, last) of K and of V to target [2, HEADS, tokens, DIM], in its dtype.

    table: of pages, in which the request's row begins at table_row and has columns for all of
    them; side_rows, head_rows: rows of target from side to side and head to head. Values are what
    the codecs decode, rounded once; UNITS: times what follows from peaks [3, HEADS]. A token
    without a page is NaN. A program takes TOKENS tokens of one head and side.
    """
    head = tl.program_id(1)
    at = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    token = first + at
    inside = token < last
    page, missing = find_pages(table + table_row, token, inside, num_pages, PAGE)
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
        if UNITS:
            rows = within_halves(rows * unit(peaks, KEYS, HEADS, head, False))
        store_rows(rows, target, head.to(tl.int64) * head_rows, at, inside, missing, K_DIM)
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
        if UNITS:
            rows = within_halves(rows * unit(peaks, VALUES, HEADS, head, False))
        above = head.to(tl.int64) * head_rows + side_rows
        store_rows(rows, target, above, at, inside, missing, V_DIM)
