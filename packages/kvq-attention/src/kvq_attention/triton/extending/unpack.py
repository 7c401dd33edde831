"""Packed tokens decoded into a scratch of fp16 rows, once for all query rows that read them."""

from __future__ import annotations

import triton.language as tl

from kvq_attention.triton.extending.items import parting, partings
from kvq_attention.triton.extending.rows import load_past
from kvq_attention.triton.jit import jit, kernel
from kvq_attention.triton.paging import find_pages


@jit
def in_units(factor):
    """Factors [tokens] in a power of two near the largest, and that power, of 2⁻⁶⁰ at least."""
    bits = factor.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    bits = tl.where(bits < (255 << 23), bits, 0)  # what is no number is none in any unit
    exponent = tl.minimum(tl.maximum(tl.max(bits, 0) >> 23, 127 - 60), 253)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return factor * inverse, (exponent << 23).to(tl.float32, bitcast=True)


@kernel(
    do_not_specialize=["table_row", "num_pages", "num_requests", "reach", "low", "share", "window"]
)
def unpack(
    planes,
    scratch,
    units,
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
    """Write scratch [requests · share, KV_HEADS, DIM] and units [tiles, KV_HEADS], float32.

    What `attend_new` takes as a dense side: rows of a tile of TOKENS tokens are to be multiplied by
    the tile's unit. A program takes such a tile of one request and head. What nobody sees is left
    as it is; a token without a page becomes NaN.
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
        0,
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
            queries, length, reach, window, WINDOW, GROUP, ROWS, TOKENS, FEWEST, 0, 0
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
            share_of_unit, unit = in_units(tl.where(inside, factor, 0.0))
            values = rows.to(tl.float32) * share_of_unit[:, None]
            values = tl.where(missing[:, None], float("nan"), values)
            column = tl.arange(0, COLUMNS * SPLIT)
            row = (place.to(tl.int64) * share + at + tl.arange(0, TOKENS)) * KV_HEADS + head
            target = scratch + row[:, None] * DIM + column[None, :]
            keep = inside[:, None] & (column < DIM)[None, :]
            tl.store(target, values.to(scratch.dtype.element_ty), mask=keep)
            tile = (place.to(tl.int64) * share + at) // TOKENS
            tl.store(units + tile * KV_HEADS + head, unit)
