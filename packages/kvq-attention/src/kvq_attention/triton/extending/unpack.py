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


@jit
def unpack_tile(
    place,
    first,
    last,
    seen_from,
    planes,
    scratch,
    units,
    table,
    pages,
    num_pages,
    share,
    LOAD: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    SCALES: tl.constexpr,
    WORD: tl.constexpr,
    STRIDES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    ASM: tl.constexpr,
):
    """A tile of one side: of the tokens [first, last) of a request, whose share `place` is.

    table: the request's row of the page table; tokens before `seen_from` are in nobody's WINDOW.
    """
    head = tl.program_id(1)
    at = tl.program_id(0) * TOKENS
    token = first + at + tl.arange(0, TOKENS)
    inside = token < last
    if WINDOW:
        inside = inside & (token > seen_from)
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


@kernel(
    do_not_specialize=["table_row", "num_pages", "num_requests", "reach", "low", "share", "window"]
)
def unpack(
    k_planes,
    k_scratch,
    k_units,
    v_planes,
    v_scratch,
    v_units,
    query_offsets,
    seq_lens,
    page_table,
    k_pages,
    v_pages,
    table_row,
    num_pages,
    num_requests,
    reach,
    low,
    share,
    window,
    K_PACKED: tl.constexpr,
    V_PACKED: tl.constexpr,
    LOAD_K: tl.constexpr,
    LOAD_V: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_COLUMNS: tl.constexpr,
    V_COLUMNS: tl.constexpr,
    K_SPLIT: tl.constexpr,
    V_SPLIT: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
    K_WORD: tl.constexpr,
    V_WORD: tl.constexpr,
    K_STRIDES: tl.constexpr,
    V_STRIDES: tl.constexpr,
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

    Of K, of V, or of K and then of V, of as many requests each: the sides that are PACKED.

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
    V_SIDE: tl.constexpr = 1 if K_PACKED else 0
    each = tl.num_programs(2)
    if K_PACKED and V_PACKED:
        each = each // 2
    side = tl.program_id(2) // each
    place = tl.program_id(2) % each
    served = tl.cumsum((items > 0).to(tl.int32), 0)
    request = tl.sum((served <= place).to(tl.int32), 0)
    if request < num_requests:
        queries = tl.load(query_offsets + request + 1) - tl.load(query_offsets + request)
        length = tl.load(seq_lens + request)
        first, _size, _tiles, _parts = parting(
            queries, length, reach, window, WINDOW, GROUP, ROWS, TOKENS, FEWEST, 0, 0
        )
        last = tl.minimum(length - queries, reach)
        first += low
        seen_from = length - queries - window
        table = page_table + request.to(tl.int64) * table_row
        there = first + tl.program_id(0) * TOKENS < last
        # Nested: what constants do not choose is not compiled.
        if K_PACKED:  # noqa: SIM102
            if there & (side == 0):
                unpack_tile(
                    place,
                    first,
                    last,
                    seen_from,
                    k_planes,
                    k_scratch,
                    k_units,
                    table,
                    k_pages,
                    num_pages,
                    share,
                    LOAD_K,
                    K_DIM,
                    K_COLUMNS,
                    K_SPLIT,
                    K_SCALES,
                    K_WORD,
                    K_STRIDES,
                    KV_HEADS,
                    PAGE,
                    TOKENS,
                    WINDOW,
                    ASM,
                )
        if V_PACKED:  # noqa: SIM102
            if there & (side == V_SIDE):
                unpack_tile(
                    place,
                    first,
                    last,
                    seen_from,
                    v_planes,
                    v_scratch,
                    v_units,
                    table,
                    v_pages,
                    num_pages,
                    share,
                    LOAD_V,
                    V_DIM,
                    V_COLUMNS,
                    V_SPLIT,
                    V_SCALES,
                    V_WORD,
                    V_STRIDES,
                    KV_HEADS,
                    PAGE,
                    TOKENS,
                    WINDOW,
                    ASM,
                )
