"""Work items of an extend: row tiles of a request, and parts of its past where those are few.

A request's query rows (query token × head of a KV head's group) are cut into tiles of ROWS. A
request of few tiles would keep few multiprocessors busy for as long as its past is, so its past is
cut into parts, of which the last also has the step's own tokens. The cut depends on the request's
own lengths alone, so the bits it gets do not depend on its company.
"""

from __future__ import annotations

import triton.language as tl

from kvq_attention.triton.jit import jit

# Row tiles × parts that a request has at most because it is cut into parts.
MOST_PARTS = tl.constexpr(16)


@jit
def parting(
    queries,
    length,
    reach,
    window,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    FEWEST: tl.constexpr,
    MOST: tl.constexpr,
    LEAST_PART: tl.constexpr,
):
    """Where requests' visible pasts begin, how long a part is, and row tiles and parts there are.

    Requests of fewer query rows than FEWEST, or of more than MOST where that is not 0, have none.
    LEAST_PART: tokens of a part at least, 0 = a past is one part. The past is what comes before the
    step's own tokens; positions from `reach` on have no column in the page table and are not cut
    into parts.
    """
    past = tl.maximum(tl.minimum(length - queries, reach), 0)
    first = past * 0
    if WINDOW:
        first = tl.minimum(tl.maximum(length - queries - window + 1, 0), past) // TOKENS * TOKENS
    visible = past - first
    lines = queries * GROUP
    if MOST > 0:
        lines = tl.where(lines > MOST, 0, lines)
    if FEWEST > 0:
        lines = tl.where(lines < FEWEST, 0, lines)
    tiles = (lines + ROWS - 1) // ROWS
    parts = tl.where(tiles > 0, 1, 0)
    size = visible
    if LEAST_PART > 0:
        wanted = (tiles * 0 + MOST_PARTS) // tl.maximum(tiles, 1)  # the interpreter's own order
        wanted = tl.minimum(wanted, (visible + LEAST_PART - 1) // LEAST_PART)
        wanted = tl.maximum(wanted, 1)
        size = ((visible + wanted - 1) // wanted + TOKENS - 1) // TOKENS * TOKENS
        size = tl.maximum(size, TOKENS)
        parts *= tl.maximum((visible + size - 1) // size, 1)
    return first, size, tiles, parts


@jit
def partings(
    query_offsets,
    seq_lens,
    num_requests,
    reach,
    window,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    FEWEST: tl.constexpr,
    MOST: tl.constexpr,
    LEAST_PART: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """Of each request, [REQUESTS]: items of a KV head, and rows of partial results."""
    index = tl.arange(0, REQUESTS)
    live = index < num_requests
    start = tl.load(query_offsets + index, mask=live, other=0)
    stop = tl.load(query_offsets + index + 1, mask=live, other=0)
    length = tl.load(seq_lens + index, mask=live, other=0)
    queries = stop - start
    _first, _size, tiles, parts = parting(
        queries, length, reach, window, WINDOW, GROUP, ROWS, TOKENS, FEWEST, MOST, LEAST_PART
    )
    return tiles * parts, tl.where(parts > 1, queries * GROUP * parts, 0)
