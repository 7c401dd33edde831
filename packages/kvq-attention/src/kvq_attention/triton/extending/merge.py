"""The merge of parts: partial results weighted by what they saw, in the order of the parts."""

from __future__ import annotations

import triton.language as tl

from kvq_attention.triton.extending.items import MOST_PARTS, parting, partings
from kvq_attention.triton.jit import kernel
from kvq_attention.triton.partials import narrow
from kvq_attention.triton.softmax import LOWEST, log2_sink


@kernel(
    do_not_specialize=[
        *("out_token", "out_head", "num_requests", "num_tokens", "capacity", "reach", "window")
    ]
)
def merge_parts(
    partial,
    partial_lse,
    query_offsets,
    seq_lens,
    sinks,
    out,
    out_token,
    out_head,
    num_requests,
    num_tokens,
    capacity,
    reach,
    window,
    V_DIM: tl.constexpr,
    V_WIDTH: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    MOST: tl.constexpr,
    LEAST_PART: tl.constexpr,
    LINES: tl.constexpr,
    REQUESTS: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Write out [tokens, heads, V_DIM] of requests that were cut into parts, and of no others.

    A program takes LINES query rows of one KV head.
    """
    head = tl.program_id(1)
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    token = line // GROUP
    index = tl.arange(0, REQUESTS)
    stops = tl.load(query_offsets + index + 1, mask=index < num_requests, other=2147483647)
    request = tl.sum((stops[None, :] <= token[:, None]).to(tl.int32), 1)
    there = (request < num_requests) & (token < num_tokens)
    start = tl.load(query_offsets + request, mask=there, other=0)
    queries = tl.load(query_offsets + request + 1, mask=there, other=0) - start
    length = tl.load(seq_lens + request, mask=there, other=0)
    _first, _size, _tiles, parts = parting(
        queries, length, reach, window, WINDOW, GROUP, ROWS, TOKENS, 0, MOST, LEAST_PART
    )
    there = there & (parts > 1)
    if tl.max(there.to(tl.int32), 0) > 0:
        _items, partial_rows = partings(
            query_offsets,
            seq_lens,
            num_requests,
            reach,
            window,
            WINDOW,
            GROUP,
            ROWS,
            TOKENS,
            0,
            MOST,
            LEAST_PART,
            REQUESTS,
        )
        before = tl.where(index[None, :] < request[:, None], partial_rows[None, :], 0)
        slot = tl.sum(before, 1) + line - start * GROUP
        stride = queries * GROUP
        part = tl.arange(0, MOST_PARTS)
        rows = slot[:, None] + part[None, :] * stride[:, None]
        known = there[:, None] & (part[None, :] < parts[:, None]) & (rows < capacity)
        lse = tl.load(
            partial_lse + rows.to(tl.int64) * KV_HEADS + head, mask=known, other=float("-inf")
        )
        top = tl.maximum(tl.max(lse, 1), LOWEST)
        heads = head * GROUP + line % GROUP
        weight = tl.zeros([LINES], tl.float32)
        if SINKS:
            sink = log2_sink(tl.load(sinks + heads, mask=there, other=0.0))
            top = tl.maximum(top, sink)
            weight = tl.exp2(sink - top)
        weight += tl.sum(tl.exp2(lse - top[:, None]), 1)
        column = tl.arange(0, V_WIDTH)
        inside = (column < V_DIM)[None, :]
        total = tl.zeros([LINES, V_WIDTH], tl.float32)
        for at in tl.range(0, MOST_PARTS):
            row = slot + at * stride
            has = there & (at < parts) & (row < capacity)
            row = row.to(tl.int64) * KV_HEADS + head
            share = tl.exp2(tl.load(partial_lse + row, mask=has, other=float("-inf")) - top)
            means = tl.load(
                partial + row[:, None] * V_DIM + column[None, :],
                mask=has[:, None] & inside,
                other=0.0,
            )
            total += share[:, None] * means
        total *= tl.where(weight == 0, 0.0, 1.0 / tl.where(weight == 0, 1.0, weight))[:, None]
        target = out + token.to(tl.int64) * out_token + heads.to(tl.int64) * out_head
        values = narrow(total, out.dtype.element_ty)
        tl.store(target[:, None] + column[None, :], values, mask=there[:, None] & inside)
