"""The largest magnitudes of what a request's queries see, for each KV head."""

from __future__ import annotations

import triton.language as tl

from kvq_attention.triton.extending.gather import decode_rows
from kvq_attention.triton.extending.halves import (
    KEYS,
    QUERIES,
    VALUES,
    finite,
    own_rows,
    raise_peak,
)
from kvq_attention.triton.extending.rows import load_scales
from kvq_attention.triton.jit import jit, kernel
from kvq_attention.triton.paging import find_pages


@jit
def past_magnitudes(
    planes,
    pages,
    page,
    token,
    head,
    known,
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
    LARGEST: tl.constexpr,
    PAGE: tl.constexpr,
    ASM: tl.constexpr,
):
    """What no magnitude of packed tokens exceeds: by their scales alone, where LARGEST is given."""
    if LARGEST is None:
        rows = decode_rows(
            planes,
            pages,
            page,
            token,
            head,
            known,
            turns,
            LOAD,
            DIM,
            COLUMNS,
            SPLIT,
            SCALES,
            WORD,
            STRIDES,
            ROTATED,
            FACTOR,
            PAGE,
            ASM,
        )
        column = tl.arange(0, rows.shape[1])
        rows = tl.where(known[:, None] & (column < DIM)[None, :], rows, 0.0)
    else:
        scales = load_scales(planes, pages, page, token, head, known, SCALES, WORD, STRIDES, PAGE)
        rows = scales * LARGEST
    return rows


@kernel(do_not_specialize=["table_row", "num_pages", "past", "tokens"])
def find_peaks(
    k_planes,
    v_planes,
    q,
    k,
    v,
    peaks,
    table,
    turns,
    k_pages,
    v_pages,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    table_row,
    num_pages,
    past,
    tokens,
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
    K_LARGEST: tl.constexpr,
    V_LARGEST: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    PAST_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr,
    ASM: tl.constexpr,
):
    """Raise peaks [3, HEADS], of keys, values and queries, to the largest magnitudes' bits.

    Of `past` tokens in the cache and `tokens` own ones, rows [tokens, heads, DIM]. A missing page
    and what is not finite do not count. A program takes PAST_TOKENS or TOKENS tokens of a KV head;
    the grid's last axis: packed keys, packed values, own keys, own values, queries.
    """
    head = tl.program_id(1)
    what = tl.program_id(2)
    if what < 2:
        at = tl.program_id(0) * PAST_TOKENS + tl.arange(0, PAST_TOKENS)
        if tl.program_id(0) * PAST_TOKENS < past:
            inside = at < past
            page, missing = find_pages(table + table_row, at, inside, num_pages, PAGE)
            known = inside & (missing == 0)
            if what == 0:
                keys = past_magnitudes(
                    k_planes,
                    k_pages,
                    page,
                    at,
                    head,
                    known,
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
                    K_LARGEST,
                    PAGE,
                    ASM,
                )
                raise_peak(peaks, KEYS, HEADS, head, keys)
            else:
                values = past_magnitudes(
                    v_planes,
                    v_pages,
                    page,
                    at,
                    head,
                    known,
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
                    V_LARGEST,
                    PAGE,
                    ASM,
                )
                raise_peak(peaks, VALUES, HEADS, head, values)
    else:
        token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
        if tl.program_id(0) * TOKENS < tokens:
            if what == 2:
                rows = own_rows(k, k_token, k_head, token, head, tokens, K_DIM, WIDTH)
                raise_peak(peaks, KEYS, HEADS, head, rows)
            elif what == 3:
                rows = own_rows(v, v_token, v_head, token, head, tokens, V_DIM, WIDTH)
                raise_peak(peaks, VALUES, HEADS, head, rows)
            else:
                rows = tl.zeros([TOKENS, WIDTH], tl.float32)
                for i in tl.static_range(GROUP):
                    asking = head * GROUP + i
                    more = own_rows(q, q_token, q_head, token, asking, tokens, K_DIM, WIDTH)
                    rows = tl.maximum(rows, tl.where(finite(more), tl.abs(more), 0.0))
                raise_peak(peaks, QUERIES, HEADS, head, rows)
