"""Packed tokens decoded into a scratch of fp16 rows, once for all query rows that read them."""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_attention.triton.extending.items import parting, partings
from kvq_attention.triton.extending.rows import load_past
from kvq_attention.triton.paging import find_pages


@triton.jit(
    do_not_specialize=["table_row", "num_pages", "num_requests", "reach", "low", "share", "window"]
)
def unpack(
    planes,
    scratch,
    factors,
    query_offsets,
    seq_lens,
    page_table,
    pages,
    table_row,
    num_pages,
    num_requests,
    reach,
    low,
    share,
    window,
    LOAD: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    SCALES: tl.constexpr,
    WORD: tl.constexpr,
    STRIDES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    FEWEST: tl.constexpr,
    REQUESTS: tl.constexpr,
    WINDOW: tl.constexpr,
    ASM: tl.constexpr,
):
    """Write scratch [requests · share, KV_HEADS, DIM] and what each row is to be multiplied by.

    These are the numbers that the loop over packed tiles has, see `load_past`, and what
    `attend_new` takes as a dense side. A program takes TOKENS tokens of one request and head. What
    nobody sees is left as it is; the factor of a token without a page is NaN.
    """
    items, _rows = partings(
        query_offsets,
        seq_lens,
        num_requests,
        reach,
        window,
        WINDOW,
        GROUP,
        ROWS,
        TOKENS,
        FEWEST,
        0,
        False,
        REQUESTS,
    )
    place = tl.program_id(2)
    served = tl.cumsum((items > 0).to(tl.int32), 0)
    request = tl.sum((served <= place).to(tl.int32), 0)
    if request < num_requests:
        head = tl.program_id(1)
        queries = tl.load(query_offsets + request + 1) - tl.load(query_offsets + request)
        length = tl.load(seq_lens + request)
        first, _size, _tiles, _parts = parting(
            queries, length, reach, window, WINDOW, GROUP, ROWS, TOKENS, FEWEST, 0, False
        )
        last = tl.minimum(length - queries, reach)
        at = tl.program_id(0) * TOKENS
        if first + low + at < last:
            token = first + low + at + tl.arange(0, TOKENS)
            inside = token < last
            if WINDOW:
                inside = inside & (token > length - queries - window)
            table = page_table + request.to(tl.int64) * table_row
            page, missing = find_pages(table, token, inside, num_pages, PAGE)
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
            column = tl.arange(0, COLUMNS * SPLIT)
            row = (place.to(tl.int64) * share + at + tl.arange(0, TOKENS)) * KV_HEADS + head
            target = scratch + row[:, None] * DIM + column[None, :]
            keep = inside[:, None] & (column < DIM)[None, :]
            tl.store(target, rows.to(scratch.dtype.element_ty), mask=keep)
            tl.store(factors + row, tl.where(missing, float("nan"), factor), mask=inside)
