"""The decode kernel: the partial attention of one piece at a time, for every format.

A score tile has 16 rows, (block, head): a format with a scale per block of the row has its query
repeated once a block, zero outside it, so that one product gives each block's share of a score,
and the scale multiplies a float32 number instead of a tile. The probabilities of row (block, head)
are scaled for that block, and of what they sum up only the block's columns are kept.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_attention.triton.items import chunking, piece_ends
from kvq_attention.triton.jit import jit, kernel
from kvq_attention.triton.partials import finish, join_sink, store_rows
from kvq_attention.triton.queries import load_queries, normalize
from kvq_attention.triton.rotation import turn
from kvq_attention.triton.scales import SCORE_ROWS
from kvq_attention.triton.softmax import log2_sink
from kvq_attention.triton.step import nothing_yet, step

# Integers that grow or differ from call to call: kernels are not compiled anew for them.
VARYING = [
    *("q_token", "q_head", "out_token", "out_head", "table_row"),
    *("num_pages", "num_requests", "num_tokens"),
    *("capacity", "reach", "window", "chunk", "wanted"),
]


@jit
def blank_padding(
    out,
    out_token,
    out_head,
    query_offsets,
    num_requests,
    num_tokens,
    Q_HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Zero the rows behind the last request's."""
    COLUMNS: tl.constexpr = triton.next_power_of_2(DIM)
    column = tl.arange(0, COLUMNS)
    used = tl.load(query_offsets + num_requests)
    for token in tl.range(used + tl.program_id(0), num_tokens, tl.num_programs(0)):
        for head in tl.range(0, Q_HEADS):
            row = tl.zeros([], tl.int64) + token
            target = out + row * out_token + (tl.zeros([], tl.int64) + head) * out_head + column
            tl.store(target, tl.zeros([COLUMNS], out.dtype.element_ty), mask=column < DIM)


@kernel(do_not_specialize=VARYING)
def attend(
    q,
    k_planes,
    v_planes,
    query_offsets,
    seq_lens,
    page_table,
    out,
    partial_lse,
    sinks,
    turns,
    out_token,
    out_head,
    k_pages,
    v_pages,
    q_token,
    q_head,
    table_row,
    num_pages,
    num_requests,
    num_tokens,
    capacity,
    reach,
    chunk,
    wanted,
    window,
    score_scale,
    softcap,
    LOAD_K: tl.constexpr,
    LOAD_V: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_COLUMNS: tl.constexpr,
    V_COLUMNS: tl.constexpr,
    K_SPLIT: tl.constexpr,
    V_SPLIT: tl.constexpr,
    K_DTYPE: tl.constexpr,
    V_DTYPE: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
    K_WORD: tl.constexpr,
    V_WORD: tl.constexpr,
    K_ROTATED: tl.constexpr,
    V_ROTATED: tl.constexpr,
    K_STRIDES: tl.constexpr,
    V_STRIDES: tl.constexpr,
    V_FACTOR: tl.constexpr,
    SHARED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    SMALLEST: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    FIXED: tl.constexpr,
    REQUESTS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    ALONE: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
    ASM: tl.constexpr,
):
    """Partial results of pieces: out float32 [pieces, HEADS, V_DIM], partial_lse [pieces, HEADS].

    ALONE: no request has more than a chunk, so they are results: out [tokens, heads, V_DIM].
    HEADS query rows (query token × head of the group) a piece. Planes, page strides and STRIDES
    (of heads and tokens) are of the first and second code plane and the scales; K_SCALES and
    V_SCALES are scales a row (0 = none); SHARED: both sides have the same strides. score_scale
    turns a product into a score in base 2 (before the soft cap: in base e).
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    if SHARED:
        # One and the same value, so that the compiler finds the rows of V where K's are.
        v_pages = k_pages
    row = tl.arange(0, SCORE_ROWS)
    block, row_head = row // HEADS, row % HEADS
    _ends, all_pieces = piece_ends(
        query_offsets,
        seq_lens,
        num_requests,
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
        HEADS,
        REQUESTS,
    )
    total = tl.minimum(tl.sum(all_pieces, 0) * KV_HEADS, capacity)
    # Every program takes an equal run of pieces: neighbours, heads first, share pages.
    run = tl.cdiv(total, tl.num_programs(0))
    first_item = tl.program_id(0) * run
    for index in tl.range(first_item, tl.minimum(first_item + run, total)):
        item = tl.zeros([], tl.int32) + index  # the interpreter counts in Python's integers
        head = item % KV_HEADS
        piece = item // KV_HEADS
        # Computed anew: kept, two numbers a request would take registers from the loop below.
        ends, pieces = piece_ends(
            query_offsets,
            seq_lens,
            num_requests,
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
            HEADS,
            REQUESTS,
        )
        request = tl.sum((ends <= piece).to(tl.int32), 0)
        piece -= tl.sum(tl.where(tl.arange(0, REQUESTS) < request, pieces, 0), 0)
        start = tl.load(query_offsets + request)
        queries = tl.load(query_offsets + request + 1) - start
        length = tl.load(seq_lens + request)
        begin, size, _count = chunking(
            queries,
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
        )
        groups = (queries * GROUP + HEADS - 1) // HEADS
        first = begin + piece // groups * size
        last = tl.minimum(length, reach)
        if FIXED:
            last = tl.where(piece // groups < MAX_CHUNKS - 1, tl.minimum(first + size, last), last)
        else:
            last = tl.minimum(first + size, last)

        line = piece % groups * HEADS + row_head
        query = line // GROUP
        asked = (query < queries) & (start + query < num_tokens)
        position = length - queries + query
        q_row = q + (start + query).to(tl.int64) * q_token
        q_row += (head * GROUP + line % GROUP).to(tl.int64) * q_head
        K_BLOCK: tl.constexpr = K_DIM // K_SCALES if K_SCALES > 1 else 0
        asking = load_queries(q_row, asked, block, K_DIM, K_COLUMNS, K_SPLIT, K_BLOCK)
        # Turning at most doubles a value, so it can come last, when values are few bits.
        SCALED: tl.constexpr = tl.float32 if K_ROTATED else K_DTYPE
        asking, power = normalize(asking, HEADS, K_SPLIT, SCALED)
        if K_ROTATED:
            asking = turn(asking, turns, K_COLUMNS, K_SPLIT, False, K_DTYPE)
        power *= score_scale

        table = page_table + request.to(tl.int64) * table_row
        state = nothing_yet(TOKENS, V_SPLIT, V_COLUMNS)
        lowest = begin
        whole = first
        if WINDOW:
            lowest = tl.maximum(length - queries - window + 1, 0)
            if FIXED:  # tiles of the first chunk that nobody sees
                whole = tl.maximum(first, lowest // TOKENS * TOKENS)
        else:
            whole = tl.minimum(last, length - queries + 1)
            whole = first + tl.maximum(whole - first, 0) // TOKENS * TOKENS
        # Tiles that every row sees need no masks; in a window there are none.
        for masked in tl.static_range(1 if WINDOW else 0, 2):
            for at in tl.range(
                whole if masked else first,
                last if masked else whole,
                TOKENS,
                num_stages=STAGES if WINDOW or not masked else 1,
            ):
                state = step(
                    at,
                    state,
                    asking,
                    power,
                    block,
                    position,
                    table,
                    head,
                    lowest,
                    last,
                    k_planes,
                    v_planes,
                    k_pages,
                    v_pages,
                    num_pages,
                    softcap,
                    window,
                    masked,
                    LOAD_K,
                    LOAD_V,
                    K_DIM,
                    V_DIM,
                    K_COLUMNS,
                    V_COLUMNS,
                    K_SPLIT,
                    V_SPLIT,
                    K_DTYPE,
                    V_DTYPE,
                    K_SCALES,
                    V_SCALES,
                    K_WORD,
                    V_WORD,
                    K_STRIDES,
                    V_STRIDES,
                    HEADS,
                    PAGE,
                    TOKENS,
                    WINDOW,
                    SOFTCAP,
                    ASM,
                )
        means, lse = finish(state, length > reach, V_SPLIT, V_FACTOR)
        q_heads = head * GROUP + line % GROUP
        if ALONE:
            if SINKS:
                sink = log2_sink(tl.load(sinks + q_heads, mask=asked, other=0.0))
                means = join_sink(means, lse, sink, V_SPLIT)
            target = (start + query).to(tl.int64) * out_token + q_heads.to(tl.int64) * out_head
            store_rows(
                means,
                out + target,
                asked,
                block,
                turns,
                V_DIM,
                V_COLUMNS,
                V_SPLIT,
                V_SCALES,
                V_ROTATED,
            )
        else:
            slot = item.to(tl.int64) * HEADS + row_head
            store_rows(
                means,
                out + slot * V_DIM,
                asked,
                block,
                turns,
                V_DIM,
                V_COLUMNS,
                V_SPLIT,
                V_SCALES,
                V_ROTATED,
            )
            tl.store(partial_lse + slot, lse, mask=asked & (block == 0))
    if ALONE:
        blank_padding(
            out,
            out_token,
            out_head,
            query_offsets,
            num_requests,
            num_tokens,
            KV_HEADS * GROUP,
            V_DIM,
        )
