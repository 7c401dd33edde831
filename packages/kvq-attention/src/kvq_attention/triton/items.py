"""Work items: how a batch's attention is cut into pieces of a fixed size, on the device.

A request's visible positions are cut into chunks, its query rows (query token × head of a KV
head's group) into groups of up to ROWS. A piece is one (chunk, group) of a request and one KV
head. The cut depends on the request's own lengths alone, and its partial results are merged in
order, so the bits it gets do not depend on its company. FIXED chunks depend on positions alone: a
query's bits do not even depend on which tokens of its request are computed beside it.
"""

from __future__ import annotations

import triton.language as tl

from kvq_attention.triton.jit import jit


@jit
def chunking(
    queries,
    length,
    reach,
    chunk,
    wanted,
    window,
    WINDOW: tl.constexpr,
    TOKENS: tl.constexpr,
    SMALLEST: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    FIXED: tl.constexpr,
):
    """Where requests' chunks begin, how long one is and how many there are.

    Chunks begin on a multiple of TOKENS. Their number is `chunks.count`: the `wanted`, of SMALLEST
    to `chunk` tokens each, and longer ones where there would be more than MAX_CHUNKS. A padded
    request (length 0) has one that is empty. Positions from `reach` on have no column in the page
    table: they are not cut into chunks, or one request's length could take the pieces of others.
    FIXED: chunks begin on multiples of `chunk` and hold as many; what is left is the last one's.
    """
    if WINDOW:
        first = tl.maximum(length - queries - window + 1, 0) // TOKENS * TOKENS
    else:
        first = length * 0
    if FIXED:
        first = first // chunk * chunk
    visible = tl.maximum(tl.minimum(length, reach) - first, 1)
    parts = tl.maximum(tl.minimum(visible // SMALLEST, wanted), (visible - 1) // chunk + 1)
    parts = tl.where(visible <= tl.minimum(2 * SMALLEST, chunk), 1, parts)
    parts = tl.minimum(parts, MAX_CHUNKS)
    size = ((visible - 1) // TOKENS // parts + 1) * TOKENS
    if FIXED:
        size = length * 0 + chunk
    count = (visible - 1) // size + 1
    if FIXED:
        count = tl.minimum(count, MAX_CHUNKS)
    return first, size, tl.where(queries > 0, count, 0)


@jit
def count_pieces(
    queries,
    length,
    reach,
    chunk,
    wanted,
    window,
    WINDOW: tl.constexpr,
    TOKENS: tl.constexpr,
    SMALLEST: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    FIXED: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Pieces of one KV head that requests are cut into."""
    _first, _size, chunks = chunking(
        queries, length, reach, chunk, wanted, window, WINDOW, TOKENS, SMALLEST, MAX_CHUNKS, FIXED
    )
    return chunks * ((queries * GROUP + ROWS - 1) // ROWS)


@jit
def piece_ends(
    query_offsets,
    seq_lens,
    num_requests,
    reach,
    chunk,
    wanted,
    window,
    WINDOW: tl.constexpr,
    TOKENS: tl.constexpr,
    SMALLEST: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    FIXED: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """Pieces of one KV head up to and with each request, [REQUESTS], and of each alone."""
    index = tl.arange(0, REQUESTS)
    live = index < num_requests
    start = tl.load(query_offsets + index, mask=live, other=0)
    stop = tl.load(query_offsets + index + 1, mask=live, other=0)
    length = tl.load(seq_lens + index, mask=live, other=0)
    pieces = count_pieces(
        stop - start,
        length,
        reach,
        chunk,
        wanted,
        window,
        WINDOW,
        TOKENS,
        SMALLEST,
        MAX_CHUNKS,
        FIXED,
        GROUP,
        ROWS,
    )
    pieces = tl.where(live, pieces, 0)
    return tl.cumsum(pieces, 0), pieces
