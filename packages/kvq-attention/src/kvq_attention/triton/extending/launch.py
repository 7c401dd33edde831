"""Extend by decoding the packed past within the loop over its tiles."""

from __future__ import annotations

import torch
import triton

from kvq_attention import launches
from kvq_attention.batch import Batch
from kvq_attention.rotation import quaternions
from kvq_attention.scoring import Scoring
from kvq_attention.triton.compat import ptx_level
from kvq_attention.triton.decode import WIDEST, request_slots, shared_memory
from kvq_attention.triton.extending import shapes
from kvq_attention.triton.extending.kernel import attend_new
from kvq_attention.triton.extending.merge import merge_parts
from kvq_attention.triton.side import Side, product_dtype
from kvq_attention.triton.softmax import LOG2_E
from kvq_codecs import Encoded

# Query rows that a program of the merge takes
MERGED_LINES = 16


def extend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: Encoded,
    v_cache: Encoded,
    batch: Batch,
    tier: str,
    scoring: Scoring,
) -> torch.Tensor:
    """Attend over the step's own rows and the cache: see `kvq_attention.ops.extend`."""
    num_tokens, q_heads, _ = q.shape
    num_pages, kv_heads, page_tokens = k_cache.lead
    out = q.new_empty(num_tokens, q_heads, v_cache.dim)
    if out.numel() == 0:
        return out
    sides = Side.of(k_cache, q.dtype), Side.of(v_cache, q.dtype)
    past_k, past_v = sides
    own = product_dtype(k.dtype, q.dtype), product_dtype(v.dtype, q.dtype)
    q, k, v = rows_in_line(q), rows_in_line(k), rows_in_line(v)
    sinks = None if scoring.sinks is None else scoring.sinks.resolve_neg().contiguous()
    table = batch.table(tier).page_table
    table = table if table.stride(1) == 1 else table.contiguous()
    group = q_heads // kv_heads
    reach = min(table.shape[1] * page_tokens, WIDEST)
    window = None if scoring.window is None else min(scoring.window, WIDEST)
    width = max(side.columns * side.tile.split for side in sides)
    widest = max(d.primitive_bitwidth // 8 for d in (*own, past_k.dtype, past_v.dtype))
    shape = shapes.pick(width, widest, shared_bytes=shared_memory(q.device))
    visible = reach if window is None else min(reach, window + num_tokens + shape.tokens)
    items, partial_rows = shapes.most_items(
        num_tokens, batch.num_requests, group, visible, shape.rows
    )
    parted = partial_rows > 0
    partial = q.new_empty(max(1, partial_rows * kv_heads), v_cache.dim, dtype=torch.float32)
    partial_lse = q.new_empty(max(1, partial_rows * kv_heads), dtype=torch.float32)
    lengths = (batch.query_offsets.contiguous(), batch.seq_lens.contiguous())
    common = {
        "WINDOW": window is not None,
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "ROWS": shape.rows,
        "TOKENS": shape.tokens,
        "REQUESTS": request_slots(batch.num_requests),
        "SINKS": sinks is not None,
    }
    base = 1.0 if scoring.softcap else LOG2_E.value
    launches.record("triton", "extend")
    attend_new[(max(1, items), kv_heads)](
        q,
        k,
        v,
        past_k.tensors,
        past_v.tensors,
        *lengths,
        table,
        out,
        partial,
        partial_lse,
        partial_lse if sinks is None else sinks,
        quaternions(q.device) if past_k.tile.rotated or past_v.tile.rotated else partial_lse,
        out.stride(0),
        out.stride(1),
        past_k.pages,
        past_v.pages,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        table.stride(0),
        num_pages,
        batch.num_requests,
        num_tokens,
        partial_rows,
        reach,
        window or 0,
        scoring.scale * past_k.tile.factor * base,
        scoring.scale * base,
        scoring.softcap or 0.0,
        **past_k.constants("K"),
        **past_v.constants("V"),
        **common,
        V_FACTOR=past_v.tile.factor,
        OWN_K_DTYPE=own[0],
        OWN_V_DTYPE=own[1],
        PAGE=page_tokens,
        PARTED=parted,
        SOFTCAP=scoring.softcap is not None,
        STAGES=shape.stages,
        ASM=ptx_level(q.device),
        num_warps=shape.warps,
    )
    if parted:
        merge_parts[(triton.cdiv(num_tokens * group, MERGED_LINES), kv_heads)](
            partial,
            partial_lse,
            *lengths,
            partial_lse if sinks is None else sinks,
            out,
            out.stride(0),
            out.stride(1),
            batch.num_requests,
            num_tokens,
            partial_rows,
            reach,
            window or 0,
            V_DIM=past_v.dim,
            V_WIDTH=past_v.columns * past_v.tile.split,
            LINES=MERGED_LINES,
            **common,
        )
    return out


def rows_in_line(rows: torch.Tensor) -> torch.Tensor:
    """The same rows, their values next to each other."""
    rows = rows.resolve_neg()
    return rows if rows.stride(2) == 1 else rows.contiguous()
