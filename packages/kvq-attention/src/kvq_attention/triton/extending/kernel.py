"""The extend kernel: a tile of query rows over its request's packed past and own tokens.

Many rows share each tile of the past, so it is put in the order of whole rows once, and scales of
blocks multiply the decoded tile: repeating rows once a block, as decode does, would repeat the
products. The sums of iso's turned values are turned back after the past, before the own tokens.
"""

from __future__ import annotations

import triton.language as tl

from kvq_attention.triton.attend import blank_padding
from kvq_attention.triton.extending.items import parting, partings
from kvq_attention.triton.extending.own import own_steps, passed_on
from kvq_attention.triton.extending.past import past_steps
from kvq_attention.triton.extending.results import (
    begin_state,
    keep_state,
    store_means,
    store_part,
)
from kvq_attention.triton.extending.rows import turn_rows
from kvq_attention.triton.jit import kernel
from kvq_attention.triton.queries import load_queries, to_powers

# Integers that grow or differ from call to call: kernels are not compiled anew for them.
VARYING = [
    *("q_token", "q_head", "out_token", "out_head", "table_row"),
    *("num_pages", "num_requests", "num_tokens"),
    *("capacity", "reach", "low", "share", "window"),
]


@kernel(do_not_specialize=VARYING)
def attend_new(
    q,
    k,
    v,
    k_planes,
    v_planes,
    query_offsets,
    seq_lens,
    page_table,
    out,
    kept,
    kept_weights,
    sinks,
    turns,
    out_token,
    out_head,
    k_pages,
    v_pages,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    table_row,
    num_pages,
    num_requests,
    num_tokens,
    capacity,
    reach,
    low,
    share,
    window,
    past_scale,
    own_scale,
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
    OWN_K_DTYPE: tl.constexpr,
    OWN_V_DTYPE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    FEWEST: tl.constexpr,
    MOST: tl.constexpr,
    LEAST_PART: tl.constexpr,
    K_DENSE: tl.constexpr,
    V_DENSE: tl.constexpr,
    RESUMED: tl.constexpr,
    KEPT: tl.constexpr,
    REQUESTS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    """Results out [tokens, heads, V_DIM] of requests of FEWEST to MOST query rows.

    A program takes an item of one KV head. Planes, page strides and STRIDES are as in decode.
    past_scale and own_scale turn a product into a score in base 2 (before the soft cap: in base e).

    LEAST_PART: see `parting`. Of requests that are cut into parts, kept float32 [rows, KV_HEADS,
    V_DIM] and kept_weights hold partial results and log2 of their weights instead.
    K_DENSE, V_DENSE: the planes are a scratch that has `share` tokens of each of those requests, in
    their order, from `low` on behind the first that it sees. These tokens are looked at, RESUMED:
    after others, of which kept [tokens, heads, V_DIM] and kept_weights hold the states; KEPT:
    before others, for which the states are written there.
    """
    head = tl.program_id(1)
    if head == 0:
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
    items, partial_rows = partings(
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
        MOST,
        LEAST_PART,
        REQUESTS,
    )
    ends = tl.cumsum(items, 0)
    # The last rows of a request have most to do, so they are begun first.
    item = tl.sum(items, 0) - 1 - tl.program_id(0)
    if item >= 0:
        request = tl.sum((ends <= item).to(tl.int32), 0)
        before = tl.arange(0, REQUESTS) < request
        item -= tl.sum(tl.where(before, items, 0), 0)
        start = tl.load(query_offsets + request)
        queries = tl.load(query_offsets + request + 1) - start
        length = tl.load(seq_lens + request)
        first, size, tiles, parts = parting(
            queries, length, reach, window, WINDOW, GROUP, ROWS, TOKENS, FEWEST, MOST, LEAST_PART
        )
        if K_DENSE or V_DENSE:
            size = share
        part = item // tiles
        first_line = item % tiles * ROWS
        past = tl.maximum(length - queries, 0)
        begin = first + low + part * size
        last = tl.minimum(tl.minimum(past, reach), begin + size)

        line = first_line + tl.arange(0, ROWS)
        query = line // GROUP
        asked = (query < queries) & (start + query < num_tokens)
        position = past + query
        heads = head * GROUP + line % GROUP
        token = (start + query).to(tl.int64)
        row = token * (KV_HEADS * GROUP) + heads
        rows = num_tokens * (KV_HEADS * GROUP)
        q_row = q + token * q_token + heads.to(tl.int64) * q_head
        lowest = begin
        if WINDOW:
            lowest = tl.maximum(past + first_line // GROUP - window + 1, begin)
            begin += tl.maximum(lowest - begin, 0) // TOKENS * TOKENS

        K_WIDTH: tl.constexpr = K_COLUMNS * K_SPLIT
        V_WIDTH: tl.constexpr = V_COLUMNS * V_SPLIT
        asking = load_queries(q_row, asked, line, K_DIM, K_WIDTH, 1, 0)
        # Turning at most doubles a value, so it can come last, when values are few bits.
        SCALED: tl.constexpr = tl.float32 if K_ROTATED else K_DTYPE
        asking, power = to_powers(asking, 1, SCALED)
        asking = asking[0]
        if K_ROTATED:
            asking = turn_rows(asking, turns, False, K_DTYPE)
        table = page_table + request.to(tl.int64) * table_row
        dense = tl.sum(tl.where(before & (items > 0), share, 0), 0) - first - low
        state = begin_state(kept, kept_weights, row, rows, asked, V_DIM, V_WIDTH, TOKENS, RESUMED)
        state = past_steps(
            state,
            asking,
            power * past_scale,
            position,
            table,
            dense,
            head,
            begin,
            lowest,
            last,
            k_planes,
            v_planes,
            k_pages,
            v_pages,
            num_pages,
            softcap,
            window,
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
            PAGE,
            TOKENS,
            WINDOW,
            SOFTCAP,
            K_DENSE,
            V_DENSE,
            STAGES,
            ASM,
        )
        # A page was needed that is not there: never the numbers of another request.
        broken = (tl.max(state[3], 0) > 0) | (past > reach)
        if KEPT:
            keep_state(state, kept, kept_weights, row, rows, asked, V_DIM)
        else:
            # Own tokens that the last row sees; a padded request (length 0) and other parts: none.
            own_last = tl.minimum(queries, (first_line + ROWS - 1) // GROUP + 1)
            own_last = tl.minimum(own_last, num_tokens - start)
            own_last = tl.where((length > 0) & (part == parts - 1), own_last, 0)
            asking = load_queries(q_row, asked, line, K_DIM, K_WIDTH, 1, 0)
            asking, power = to_powers(asking, 1, OWN_K_DTYPE)
            own_state = own_steps(
                passed_on(state, turns, V_ROTATED, V_FACTOR),
                asking[0],
                power * own_scale,
                query,
                k + start.to(tl.int64) * k_token + head.to(tl.int64) * k_head,
                v + start.to(tl.int64) * v_token + head.to(tl.int64) * v_head,
                k_token,
                v_token,
                first_line // GROUP,
                own_last,
                softcap,
                window,
                K_DIM,
                V_DIM,
                K_WIDTH,
                V_WIDTH,
                OWN_K_DTYPE,
                OWN_V_DTYPE,
                TOKENS,
                WINDOW,
                SOFTCAP,
                STAGES,
                ASM,
            )
            if parts == 1:
                target = out + token * out_token + heads.to(tl.int64) * out_head
                store_means(own_state, target, asked, broken, sinks, heads, V_DIM, SINKS)
            elif LEAST_PART > 0:
                slot = tl.sum(tl.where(before, partial_rows, 0), 0) + part * queries * GROUP + line
                asked = asked & (slot < capacity)
                row = slot.to(tl.int64) * KV_HEADS + head
                store_part(own_state, kept + row * V_DIM, kept_weights + row, asked, broken, V_DIM)
