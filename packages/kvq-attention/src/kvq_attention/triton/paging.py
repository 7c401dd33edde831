"""Position → page → row, on the device."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_pages(table, position, mask, num_pages, table_pages, PAGE: tl.constexpr):
    """Page int64 [tokens] of each position, and whether there is one.

    table: a request's row of the page table, `table_pages` long. A position that the table does
    not reach, or whose page is outside [0, num_pages), is given page 0 and False. What is masked
    is given page 0 and True.
    """
    column = position // PAGE
    reached = column < table_pages
    page = tl.load(table + column, mask=mask & reached, other=-1)
    found = (page >= 0) & (page < num_pages)
    return tl.where(found, page, 0).to(tl.int64), found | ~mask


@triton.jit
def rows_of(
    page, position, head, page_stride, HEAD: tl.constexpr, TOKEN: tl.constexpr, PAGE: tl.constexpr
):
    """Offset int64 [tokens] of each position's row in a plane [pages, heads, PAGE, items]."""
    return page * page_stride + (head.to(tl.int64) * HEAD + (position % PAGE).to(tl.int64) * TOKEN)
