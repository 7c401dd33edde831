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
from kvq_attention.triton.paging import find_pages, rows_of
from kvq_attention.triton.queries import load_queries, normalize
from kvq_attention.triton.rotation import turn
from kvq_attention.triton.scales import SCORE_ROWS, load_scales, sum_blocks

# Below every score and finite: exp2(−∞ − LOWEST) is 0, where −∞ − −∞ would be NaN.
LOWEST = tl.constexpr(-3.0e38)
# Bounds of a value scale in the softmax's reference, which one of 0, ∞ or NaN must not decide.
SMALL = tl.constexpr(2.0**-60)
LARGE = tl.constexpr(2.0**60)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def zeros(SPLIT: tl.constexpr, COLUMNS: tl.constexpr):
    tiles = ()
    for _ in tl.static_range(SPLIT):
        tiles = tiles + (tl.zeros([SCORE_ROWS, COLUMNS], tl.float32),)
    return tiles


@triton.jit
def scores_of(queries, keys, TOKENS: tl.constexpr, SPLIT: tl.constexpr, DTYPE: tl.constexpr):
    """queries · keysᵀ over all tiles, float32 [16, TOKENS]."""
    scores = tl.zeros([SCORE_ROWS, TOKENS], tl.float32)
    for i in tl.static_range(SPLIT):
        key = tl.trans(keys[i].to(DTYPE))
        scores = tl.dot(queries[i], key, scores, input_precision="tf32x3")
    return scores


@triton.jit
def accumulate(sums, weights, values, fade, SPLIT: tl.constexpr, DTYPE: tl.constexpr):
    """sums · fade + weights · values, tile by tile."""
    added = ()
    for i in tl.static_range(SPLIT):
        value = values[i].to(DTYPE)
        faded = sums[i] * fade[:, None]
        added = added + (tl.dot(weights, value, faded, input_precision="tf32x3"),)
    return added


@triton.jit(do_not_specialize=["num_requests", "num_tokens", "table_pages", "num_pages", "window"])
def attend(
    q,
    ka,
    kb,
    ks,
    va,
    vb,
    vs,
    query_offsets,
    seq_lens,
    page_table,
    partial_out,
    partial_lse,
    turns,
    q_token,
    q_head,
    ka_page,
    kb_page,
    ks_page,
    va_page,
    vb_page,
    vs_page,
    table_row,
    table_pages,
    num_pages,
    num_requests,
    num_tokens,
    capacity,
    score_scale,
    softcap,
    window,
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
    V_FACTOR: tl.constexpr,
    KA_HEAD: tl.constexpr,
    KA_TOKEN: tl.constexpr,
    KB_HEAD: tl.constexpr,
    KB_TOKEN: tl.constexpr,
    KS_HEAD: tl.constexpr,
    KS_TOKEN: tl.constexpr,
    VA_HEAD: tl.constexpr,
    VA_TOKEN: tl.constexpr,
    VB_HEAD: tl.constexpr,
    VB_TOKEN: tl.constexpr,
    VS_HEAD: tl.constexpr,
    VS_TOKEN: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    REQUESTS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    """Partial results of pieces: partial_out [pieces, HEADS, V_DIM], partial_lse [pieces, HEADS].

    HEADS query rows (query token × head of the group) a piece; K_SCALES, V_SCALES: scales a row
    (0 = none). score_scale turns a product into a score in base 2 (before the soft cap: in base
    e). partial_lse is log2 of the sum of exp2(score): −∞ for a row that saw nothing, NaN for one
    that had to read a page that is not there.
    """
    row = tl.arange(0, SCORE_ROWS)
    block, row_head = row // HEADS, row % HEADS
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
    total = tl.minimum(tl.sum(pieces, 0) * KV_HEADS, capacity)
    for index in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        item = tl.zeros([], tl.int32) + index  # the interpreter counts in Python's integers
        head = item % KV_HEADS
        piece = item // KV_HEADS
        request = tl.sum((ends <= piece).to(tl.int32), 0)
        piece -= tl.sum(tl.where(tl.arange(0, REQUESTS) < request, pieces, 0), 0)
        start = tl.load(query_offsets + request)
        queries = tl.load(query_offsets + request + 1) - start
        length = tl.load(seq_lens + request)
        begin, size, _ = chunking(queries, length, window, WINDOW, TOKENS, CHUNK, MAX_CHUNKS)
        groups = (queries * GROUP + HEADS - 1) // HEADS
        first = begin + piece // groups * size
        last = tl.minimum(first + size, length)

        line = piece % groups * HEADS + row_head
        query = line // GROUP
        asked = (query < queries) & (start + query < num_tokens)
        position = length - queries + query
        q_row = q + (start + query).to(tl.int64) * q_token
        q_row += (head * GROUP + line % GROUP).to(tl.int64) * q_head
        K_BLOCK: tl.constexpr = K_DIM // K_SCALES if K_SCALES > 1 else 0
        asking = load_queries(q_row, asked, block, K_DIM, K_COLUMNS, K_SPLIT, K_BLOCK)
        if K_ROTATED:
            asking = turn(asking, turns, K_COLUMNS, K_SPLIT, False)
        asking, power = normalize(asking, K_SPLIT, K_DTYPE)
        power *= score_scale

        table = page_table + request.to(tl.int64) * table_row
        lowest = begin
        if WINDOW:
            lowest = tl.maximum(length - queries - window + 1, 0)
        top = tl.full([SCORE_ROWS], LOWEST, tl.float32)
        weight = tl.zeros([SCORE_ROWS], tl.float32)
        sums = zeros(V_SPLIT, V_COLUMNS)
        lost = tl.zeros([TOKENS], tl.int32)
        for at in tl.range(first, last, TOKENS, num_stages=STAGES):
            token = at + tl.arange(0, TOKENS)
            inside = (token >= lowest) & (token < last)
            page, found = find_pages(table, token, inside, num_pages, table_pages, PAGE)
            lost |= (~found).to(tl.int32)

            a_rows = rows_of(page, token, head, ka_page, KA_HEAD, KA_TOKEN, PAGE)
            b_rows = rows_of(page, token, head, kb_page, KB_HEAD, KB_TOKEN, PAGE)
            keys = LOAD_K(ka, kb, a_rows, b_rows, inside, K_DIM, K_COLUMNS, ASM)
            scores = scores_of(asking, keys, TOKENS, K_SPLIT, K_DTYPE) * power[:, None]
            if K_SCALES > 0:
                s_rows = rows_of(page, token, head, ks_page, KS_HEAD, KS_TOKEN, PAGE)
                scores *= load_scales(ks, s_rows, inside, block, K_SCALES, K_WORD)
                if K_SCALES > 1:
                    scores = sum_blocks(scores, HEADS, TOKENS)
            if SOFTCAP:
                # softcap · tanh(score / softcap), as 1 − 2 / (e^2x + 1)
                grown = tl.exp2(scores * (2 * LOG2_E / softcap)) + 1
                scores = (softcap - 2 * softcap / grown) * LOG2_E
            seen = inside[None, :] & (token[None, :] <= position[:, None])
            if WINDOW:
                seen &= token[None, :] > (position - window)[:, None]
            scores = tl.where(seen, scores, float("-inf"))

            a_rows = rows_of(page, token, head, va_page, VA_HEAD, VA_TOKEN, PAGE)
            b_rows = rows_of(page, token, head, vb_page, VB_HEAD, VB_TOKEN, PAGE)
            values = LOAD_V(va, vb, a_rows, b_rows, inside, V_DIM, V_COLUMNS, ASM)
            if V_SCALES > 0:
                s_rows = rows_of(page, token, head, vs_page, VS_HEAD, VS_TOKEN, PAGE)
                scale = load_scales(vs, s_rows, inside, block, V_SCALES, V_WORD)
                # The reference is the largest weighted scale, so that the largest probability ×
                # scale is 1: fp16 holds it, and what it rounds off is small beside it.
                log = tl.log2(tl.minimum(tl.maximum(scale, SMALL), LARGE))
                new_top = tl.maximum(top, tl.max(scores + log, 1))
            else:
                new_top = tl.maximum(top, tl.max(scores, 1))
            fade = tl.exp2(top - new_top)
            weights = tl.exp2(scores - new_top[:, None])
            weight = weight * fade + tl.sum(weights, 1)
            top = new_top
            if V_SCALES > 0:
                weights = tl.where(seen, weights * scale, 0.0)
            sums = accumulate(sums, weights.to(V_DTYPE), values, fade, V_SPLIT, V_DTYPE)

        empty = weight == 0
        weight = tl.where(empty, 1.0, weight)
        share = 1.0 / weight
        lse = tl.where(empty, float("-inf"), top + tl.log2(weight))
        # NaN, not numbers of another request, where a page was needed that is not there
        broken = tl.max(lost, 0) > 0
        share = tl.where(broken, float("nan"), share)
        lse = tl.where(broken, float("nan"), lse)
        if V_ROTATED:
            sums = turn(sums, turns, V_COLUMNS, V_SPLIT, True)
        column = tl.arange(0, V_COLUMNS)
        keep = asked[:, None] & (column * V_SPLIT < V_DIM)[None, :]
        if V_SCALES > 1:
            keep &= (column[None, :] * V_SPLIT // (V_DIM // V_SCALES)) == block[:, None]
        else:
            keep &= (block == 0)[:, None]
        slot = item.to(tl.int64) * HEADS + row_head
        for i in tl.static_range(V_SPLIT):
            out = partial_out + slot[:, None] * V_DIM + (column * V_SPLIT + i)[None, :]
            tl.store(out, sums[i] * (share * V_FACTOR)[:, None], mask=keep)
        tl.store(partial_lse + slot, lse, mask=asked & (block == 0))
