"""The merge: a row's partial results, weighted by what they saw, in the order of their chunks."""

from __future__ import annotations

import triton.language as tl

from kvq_attention.triton.items import chunking, count_pieces
from kvq_attention.triton.jit import kernel
from kvq_attention.triton.partials import narrow
from kvq_attention.triton.softmax import LOWEST, log2_sink

# Chunks weighed at a time: fixed, as the order of the sums must not depend on the launch.
BATCH = tl.constexpr(32)


@kernel(do_not_specialize=["num_requests", "capacity", "reach", "wanted", "window"])
def merge(
    partial_out,
    partial_lse,
    query_offsets,
    seq_lens,
    sinks,
    out,
    out_token,
    out_head,
    num_requests,
    capacity,
    reach,
    wanted,
    window,
    V_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    SMALLEST: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    FIXED: tl.constexpr,
    REQUESTS: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program a query token and head: out [tokens, heads, V_DIM]; rows nobody asked give 0."""
    token = tl.program_id(0)
    q_head = tl.program_id(1)
    index = tl.arange(0, REQUESTS)
    live = index < num_requests
    starts = tl.load(query_offsets + index, mask=live, other=0)
    stops = tl.load(query_offsets + index + 1, mask=live, other=2147483647)
    lengths = tl.load(seq_lens + index, mask=live, other=0)
    request = tl.sum((stops <= token).to(tl.int32), 0)
    ours = live & (index == request)
    start = tl.sum(tl.where(ours, starts, 0), 0)
    queries = tl.sum(tl.where(ours, stops - starts, 0), 0)
    length = tl.sum(tl.where(ours, lengths, 0), 0)

    asked = tl.where(live, stops - starts, 0)
    before = count_pieces(
        asked,
        lengths,
        reach,
        CHUNK,
        wanted,
        window,
        WINDOW,
        TOKENS,
        SMALLEST,
        MAX_CHUNKS,
        FIXED,
        GROUP,
        HEADS,
    )
    before = tl.sum(tl.where(index < request, before, 0), 0)
    begin, _size, chunks = chunking(
        queries, length, reach, CHUNK, wanted, window, WINDOW, TOKENS, SMALLEST, MAX_CHUNKS, FIXED
    )
    line = (token - start) * GROUP + q_head % GROUP
    piece = before + line // HEADS
    slot = (piece * KV_HEADS + q_head // GROUP) * HEADS + line % HEADS
    stride = tl.maximum((queries * GROUP + HEADS - 1) // HEADS, 1) * KV_HEADS * HEADS
    # A launch whose numbers contradict each other must not read beyond what was written.
    chunks = tl.minimum(chunks, tl.maximum(capacity * HEADS - slot + stride - 1, 0) // stride)

    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # for what attend stores; all above it did not write
    at = tl.arange(0, MAX_CHUNKS)
    stop = chunks
    if FIXED and WINDOW:
        # Every chunk keeps its place in the sums, whichever of a request's is the first.
        stop = MAX_CHUNKS
        at = (at - begin // CHUNK) & (MAX_CHUNKS - 1)
    row = slot.to(tl.int64) + at.to(tl.int64) * stride
    lse = tl.load(partial_lse + row, mask=at < chunks, other=float("-inf"))
    top = tl.maximum(tl.max(lse, 0), LOWEST)
    weight = 0.0
    if SINKS:
        sink = log2_sink(tl.load(sinks + q_head))
        top = tl.maximum(top, sink)
        weight = tl.exp2(sink - top)
    weight += tl.sum(tl.exp2(lse - top), 0)
    column = tl.arange(0, COLUMNS)
    inside = column < V_DIM
    total = tl.zeros([COLUMNS], tl.float32)
    for first in tl.range(0, stop, BATCH):
        some = first + tl.arange(0, BATCH)
        if FIXED and WINDOW:
            turned = (some - begin // CHUNK) & (MAX_CHUNKS - 1)
            some = tl.where(some < MAX_CHUNKS, turned, chunks)
        rows = slot.to(tl.int64) + some.to(tl.int64) * stride
        near = tl.load(partial_lse + rows, mask=some < chunks, other=float("-inf"))
        share = tl.exp2(near - top)
        part = tl.load(
            partial_out + rows[:, None] * V_DIM + column[None, :],
            mask=(some < chunks)[:, None] & inside[None, :],
            other=0.0,
        )
        total += tl.sum(share[:, None] * part, 0)
    total = tl.where(weight == 0, 0.0, total * (1.0 / tl.where(weight == 0, 1.0, weight)))
    target = out + token.to(tl.int64) * out_token + q_head.to(tl.int64) * out_head + column
    tl.store(target, narrow(total, out.dtype.element_ty), mask=inside)
