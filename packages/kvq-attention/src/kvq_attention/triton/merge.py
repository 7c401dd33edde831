"""The merge: a row's partial results, weighted by what they saw, in the order of their chunks."""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_attention.triton.attend import LOG2_E, LOWEST
from kvq_attention.triton.compat import INTERPRET
from kvq_attention.triton.items import chunking, piece_ends


@triton.jit
def narrow(values, DTYPE: tl.constexpr):
    """float32 values in DTYPE, rounded to nearest even; the interpreter truncates to bf16."""
    if INTERPRET and DTYPE == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        bits = tl.where(values == values, rounded, bits | 0x400000)
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return values.to(DTYPE)


# Chunks weighed at a time: fixed, as the order of the sums must not depend on the launch.
BATCH = tl.constexpr(16)


@triton.jit(do_not_specialize=["num_requests", "window"])
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
    window,
    V_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    REQUESTS: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
):
    """One program a query token and head: out [tokens, heads, V_DIM]; rows nobody asked give 0."""
    token = tl.program_id(0)
    q_head = tl.program_id(1)
    ends, pieces = piece_ends(
        query_offsets,
        seq_lens,
        num_requests,
        window,
        WINDOW,
        TOKENS,
        CHUNK,
        MAX_CHUNKS,
        GROUP,
        HEADS,
        REQUESTS,
    )
    index = tl.arange(0, REQUESTS)
    stops = tl.load(query_offsets + index + 1, mask=index < num_requests, other=2147483647)
    request = tl.sum((stops <= token).to(tl.int32), 0)
    column = tl.arange(0, COLUMNS)
    inside = column < V_DIM
    target = out + token.to(tl.int64) * out_token + q_head.to(tl.int64) * out_head + column
    chunks = 0
    slot = 0
    groups = 1
    if request < num_requests:
        start = tl.load(query_offsets + request)
        queries = tl.load(query_offsets + request + 1) - start
        length = tl.load(seq_lens + request)
        _, _, chunks = chunking(queries, length, window, WINDOW, TOKENS, CHUNK, MAX_CHUNKS)
        groups = (queries * GROUP + HEADS - 1) // HEADS
        line = (token - start) * GROUP + q_head % GROUP
        before = tl.sum(tl.where(index < request, pieces, 0), 0)
        piece = before + line // HEADS
        slot = (piece * KV_HEADS + q_head // GROUP) * HEADS + line % HEADS
    stride = groups * KV_HEADS * HEADS
    # A launch whose numbers contradict each other must not read beyond what was written.
    chunks = tl.minimum(chunks, tl.maximum(capacity * HEADS - slot + stride - 1, 0) // stride)

    top = tl.full([1], LOWEST, tl.float32)
    if SINKS:
        sink = tl.load(sinks + q_head + tl.arange(0, 1)).to(tl.float32) * LOG2_E
        top = tl.maximum(top, sink)
    at = tl.arange(0, BATCH)
    for first in tl.range(0, chunks, BATCH):
        here = (first + at) < chunks
        lse = tl.load(
            partial_lse + slot.to(tl.int64) + (first + at).to(tl.int64) * stride,
            mask=here,
            other=float("-inf"),
        )
        top = tl.maximum(top, tl.max(lse, 0))
    weight = tl.zeros([1], tl.float32)
    if SINKS:
        weight += tl.exp2(sink - top)
    total = tl.zeros([COLUMNS], tl.float32)
    for first in tl.range(0, chunks, BATCH):
        here = (first + at) < chunks
        row = slot.to(tl.int64) + (first + at).to(tl.int64) * stride
        lse = tl.load(partial_lse + row, mask=here, other=float("-inf"))
        share = tl.exp2(lse - top)
        part = tl.load(
            partial_out + row[:, None] * V_DIM + column[None, :],
            mask=here[:, None] & inside[None, :],
            other=0.0,
        )
        weight += tl.sum(share, 0)
        total += tl.sum(share[:, None] * part, 0)
    total = tl.where(weight == 0, 0.0, total / tl.where(weight == 0, 1.0, weight))
    tl.store(target, narrow(total, out.dtype.element_ty), mask=inside)
