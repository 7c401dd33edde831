"""Decode: attention over the cache alone, in two launches, partial results and their merge."""

from __future__ import annotations

from functools import cache

import torch

from kvq_attention import launches
from kvq_attention.batch import Batch
from kvq_attention.device import processors
from kvq_attention.rotation import quaternions
from kvq_attention.scoring import Scoring
from kvq_attention.triton import tiles
from kvq_attention.triton.attend import attend
from kvq_attention.triton.compat import ptx_level
from kvq_attention.triton.merge import merge
from kvq_attention.triton.scales import SCORE_ROWS
from kvq_attention.triton.side import Side
from kvq_attention.triton.softmax import LOG2_E
from kvq_codecs import Encoded

# The last position that the kernels' int32 tells from others; a longer window is none at all.
WIDEST = 2**31 - 1
# Warps of a multiprocessor's registers, of which decode takes nearly all that a thread can have
WARPS = 8
# Registers a thread; left to itself, the compiler spills some to have more programs at once.
ATTEND_REGISTERS = 255
MERGE_REGISTERS = 128


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
    k, v = Side.of(k_cache, q.dtype), Side.of(v_cache, q.dtype)
    config = config or tiles.pick(k.load, v.load, shared_bytes=shared_memory(q.device), warps=WARPS)
    config = tiles.fixed(config) if batch.any_cut else config
    q = q.resolve_neg() if q.stride(2) == 1 else q.resolve_neg().contiguous()
    sinks = None if scoring.sinks is None else scoring.sinks.resolve_neg().contiguous()
    table = batch.table(tier).page_table
    table = table if table.stride(1) == 1 else table.contiguous()
    group = q_heads // kv_heads
    heads = SCORE_ROWS.value // tiles.power_of_two(max(k.scales, v.scales, 1))
    reach = min(table.shape[1] * page_tokens, WIDEST)
    window = None if scoring.window is None else min(scoring.window, WIDEST)
    each = kv_heads * -(-group // heads)  # pieces a chunk
    wanted = config.wanted(batch.usual_requests, each, processors(q.device))
    chunks = tiles.most_chunks(reach, window, num_tokens, config, wanted)
    groups = min(num_tokens * -(-group // heads), batch.num_requests + num_tokens * group // heads)
    pieces = max(1, chunks * groups * kv_heads)  # padding alone is blanked by a program, too
    alone = chunks == 1 and not config.fixed  # which rounds as a merge does not
    partial = out if alone else q.new_empty(pieces, heads, v.dim, dtype=torch.float32)
    partial_lse = q.new_empty(1 if alone else pieces * heads, dtype=torch.float32)
    level = ptx_level(q.device)
    lengths = (batch.query_offsets.contiguous(), batch.seq_lens.contiguous())
    common = {
        "WINDOW": window is not None,
        "TOKENS": config.tokens,
        "SMALLEST": config.smallest,
        "MAX_CHUNKS": config.max_chunks,
        "FIXED": config.fixed,
        "REQUESTS": request_slots(batch.num_requests),
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "HEADS": heads,
        "SINKS": sinks is not None,
        # The merge starts while the last partial results are made, and waits for them.
        "OVERLAP": level >= 90,
    }
    score_scale = scoring.scale * k.tile.factor
    launches.record("triton", "decode")
    attend[(min(pieces, config.programs * processors(q.device)),)](
        q,
        k.tensors,
        v.tensors,
        *lengths,
        table,
        partial,
        partial_lse,
        partial_lse if sinks is None else sinks,
        quaternions(q.device) if k.tile.rotated or v.tile.rotated else partial_lse,
        out.stride(0),
        out.stride(1),
        k.pages,
        v.pages,
        q.stride(0),
        q.stride(1),
        table.stride(0),
        num_pages,
        batch.num_requests,
        num_tokens,
        pieces,
        reach,
        config.chunk,
        wanted,
        window or 0,
        score_scale if scoring.softcap else score_scale * LOG2_E.value,
        scoring.softcap or 0.0,
        **k.constants("K"),
        **v.constants("V"),
        **common,
        V_FACTOR=v.tile.factor,
        SHARED=[p.strides for p in k.planes] == [p.strides for p in v.planes],
        PAGE=page_tokens,
        SOFTCAP=scoring.softcap is not None,
        ALONE=alone,
        STAGES=config.stages,
        ASM=level,
        num_warps=config.warps,
        **({"maxnreg": ATTEND_REGISTERS} if level else {}),
    )
    if alone:
        return out
    merge[(num_tokens, q_heads)](
        partial,
        partial_lse,
        *lengths,
        partial_lse if sinks is None else sinks,
        out,
        out.stride(0),
        out.stride(1),
        batch.num_requests,
        pieces,
        reach,
        wanted,
        window or 0,
        V_DIM=v.dim,
        COLUMNS=tiles.power_of_two(v.dim),
        CHUNK=config.chunk,  # a constant: on sm_90 113 registers, of loads under way, not 72
        **common,
        **({"launch_pdl": True} if common["OVERLAP"] else {}),
        **({"maxnreg": MERGE_REGISTERS} if level else {}),
    )
    return out


def request_slots(requests: int) -> int:
    """Requests that a kernel is compiled for: few sizes, as each is a compilation of its own."""
    slots = 32
    while slots < requests:
        slots *= 8
    return slots


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory a multiprocessor; a large GPU's where there is none."""
    if device.type != "cuda":
        return 228 << 10
    found: int = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    return found
