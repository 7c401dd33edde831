"""Position → page → row, on the device."""

from __future__ import annotations

import triton.language as tl

from kvq_attention.triton.jit import jit


@jit
def find_pages(table, position, mask, num_pages, PAGE: tl.constexpr):
    """Page int32 [tokens] of each position, and whether it is missing.

    table: a request's row of the page table, which must reach the positions. One whose page is
    outside [0, num_pages) is given page 0 and True; what is masked page 0 and False. mask None =
    nothing is.
    """
    column = position.to(tl.uint32) // PAGE  # unsigned: a shift
    if mask is None:
        page = tl.load(table + column)
        missing = (page < 0) | (page >= num_pages)
    else:
        page = tl.load(table + column, mask=mask, other=0)
        missing = mask & ((page < 0) | (page >= num_pages))
    return tl.where((page < 0) | (page >= num_pages), 0, page), missing


@jit
def rows_of(
    page, position, head, pages, STRIDES: tl.constexpr, PLANE: tl.constexpr, PAGE: tl.constexpr
):
    """Offset int64 [tokens] of each position's row in a plane [pages, heads, PAGE, items].

    pages, STRIDES: strides of pages, and of heads and tokens, of every plane; PLANE: which one.
    """
    token = (position.to(tl.uint32) % PAGE).to(tl.int64)
    row = head.to(tl.int64) * STRIDES[PLANE][0] + token * STRIDES[PLANE][1]
    return page.to(tl.int64) * pages[PLANE] + row
