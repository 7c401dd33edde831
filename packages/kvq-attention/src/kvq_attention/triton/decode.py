"""Decode: attention over the cache alone, in two launches, partial results and their merge."""

from __future__ import annotations

from functools import cache

import torch
import triton

from kvq_attention import launches
from kvq_attention.batch import Batch
from kvq_attention.scoring import Scoring
from kvq_attention.triton import tiles
from kvq_attention.triton.attend import attend
from kvq_attention.triton.compat import ptx_level
from kvq_attention.triton.merge import merge
from kvq_attention.triton.rotation import quaternions
from kvq_attention.triton.scales import SCORE_ROWS
from kvq_attention.triton.side import Side
from kvq_attention.triton.softmax import LOG2_E
from kvq_codecs import Encoded

# The last position that the kernels' int32 tells from others; a longer window is none at all.
WIDEST = 2**31 - 1


def decode(
    q: torch.Tensor,
    k_cache: Encoded,
    v_cache: Encoded,
    batch: Batch,
    tier: str,
    scoring: Scoring,
) -> torch.Tensor:
    """Attend over the cache alone: see `kvq_attention.ops.decode`."""
    return launch(q, k_cache, v_cache, batch, tier, scoring, None)


def launch(
    q: torch.Tensor,
    k_cache: Encoded,
    v_cache: Encoded,
    batch: Batch,
    tier: str,
    scoring: Scoring,
    config: tiles.Config | None,
) -> torch.Tensor:
    """Decode with a launch shape of one's own; None = the picked one."""
    num_tokens, q_heads, _ = q.shape
    num_pages, kv_heads, page_tokens = k_cache.lead
    out = q.new_empty(num_tokens, q_heads, v_cache.dim)
    if out.numel() == 0:
        return out
    config = config or tiles.Config()
    if q.stride(2) != 1:
        q = q.contiguous()
    table = batch.table(tier).page_table
    reach = min(table.shape[1] * page_tokens, WIDEST)
    window = min(scoring.window or 0, WIDEST)
    group = q_heads // kv_heads
    k, v = Side.of(k_cache, q.dtype), Side.of(v_cache, q.dtype)
    heads = SCORE_ROWS.value // triton.next_power_of_2(max(k.scales, v.scales, 1))
    capacity = kv_heads * most_pieces(batch, table.shape[1], group, heads, config)
    partial_out = q.new_empty(capacity * heads * v_cache.dim, dtype=torch.float32)
    partial_lse = q.new_empty(capacity * heads, dtype=torch.float32)
    turns = quaternions(q.device) if k.tile.rotated or v.tile.rotated else partial_lse
    cut = {
        "WINDOW": scoring.window is not None,
        "TOKENS": config.tokens,
        "MAX_CHUNKS": config.max_chunks,
        "GROUP": group,
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "REQUESTS": request_slots(batch.num_requests),
    }
    score_scale = scoring.scale * k.tile.factor
    if scoring.softcap is None:
        score_scale *= LOG2_E.value
    launches.record("triton", "decode")
    programs = min(capacity, config.programs * processors(q.device))
    attend[(programs,)](
        q,
        k.tensors,
        v.tensors,
        batch.query_offsets,
        batch.seq_lens,
        table,
        partial_out,
        partial_lse,
        turns,
        k.pages,
        v.pages,
        q.stride(0),
        q.stride(1),
        table.stride(0),
        num_pages,
        batch.num_requests,
        num_tokens,
        capacity,
        reach,
        config.chunk,
        window,
        score_scale,
        scoring.softcap or 0.0,
        **k.constants("K"),
        **v.constants("V"),
        **cut,
        V_FACTOR=v.tile.factor,
        SHARED=[p.strides for p in k.planes] == [p.strides for p in v.planes],
        PAGE=page_tokens,
        SOFTCAP=scoring.softcap is not None,
        STAGES=config.stages,
        ASM=ptx_level(q.device),
        num_warps=config.warps,
        **({"maxnreg": config.registers} if config.registers and ptx_level(q.device) else {}),
    )
    merge[(num_tokens, q_heads)](
        partial_out,
        partial_lse,
        batch.query_offsets,
        batch.seq_lens,
        partial_lse if scoring.sinks is None else scoring.sinks,
        out,
        out.stride(0),
        out.stride(1),
        batch.num_requests,
        capacity,
        reach,
        config.chunk,
        window,
        V_DIM=v_cache.dim,
        COLUMNS=triton.next_power_of_2(v_cache.dim),
        SINKS=scoring.sinks is not None,
        **cut,
    )
    return out


def most_pieces(
    batch: Batch, table_pages: int, group: int, heads: int, config: tiles.Config
) -> int:
    """Pieces of one KV head that a batch of these shapes has at most."""
    tokens, requests = batch.num_tokens, batch.num_requests
    # A chunk may begin before the first visible position, up to a tile.
    chunks = min(-(-table_pages * batch.page_tokens // config.chunk) + 1, config.max_chunks)
    groups = min(tokens * -(-group // heads), requests + tokens * group // heads)
    return chunks * groups


def request_slots(requests: int) -> int:
    """Requests that a kernel is compiled for: few sizes, as each is a compilation of its own."""
    return 64 if requests <= 64 else max(1024, triton.next_power_of_2(requests))


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a device; 1 where programs run one after another."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
