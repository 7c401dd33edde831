"""Decode: attention over the cache alone, in two launches, partial results and their merge."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

import kvq_codecs
from kvq_attention import launches
from kvq_attention.batch import Batch
from kvq_attention.cuda import arguments, formats, items, shapes
from kvq_attention.cuda.compile import source
from kvq_attention.cuda.module import Function, function
from kvq_attention.device import processors
from kvq_attention.errors import UnsupportedError
from kvq_attention.rotation import quaternions
from kvq_attention.scoring import Scoring
from kvq_codecs import Encoded

LOG2_E = 1.4426950408889634
# Positions that the kernels' int32 counts, and steps beyond them; a longer window is none at all.
WIDEST = 2**31 - 2**12
WIDE_VALUE_BYTES = 2  # of a value of formats that are not packed
MERGE_WARPS = (16, 8, 2, 1)  # of a block
MERGE_RUN = 8  # chunks of a row that are summed up for themselves
MERGE_WIDTH = 128  # values of a row that a block takes
NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


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
    shape: shapes.Shape | None,
) -> torch.Tensor:
    """Decode with a launch shape of one's own; None = the picked one."""
    num_tokens, q_heads, dim = q.shape
    num_pages, kv_heads, page_tokens = k_cache.lead
    out = q.new_empty(num_tokens, q_heads, v_cache.dim)
    if out.numel() == 0:
        return out
    check(q, k_cache, v_cache, batch)
    group = q_heads // kv_heads
    # A guess of query rows a request; another would give the same bits.
    likely = -(-num_tokens // max(batch.num_requests, 1)) * group
    k, v = k_cache.spec.name, v_cache.spec.name
    shape = shape or picked(k, v, dim, likely, q.device)
    one_tile = page_tokens == items.TILE
    kernels = load(k, v, dim, q.dtype, shape, scoring.softcap is not None, one_tile, q.device)
    q = q.resolve_neg()
    if q.stride(2) != 1 or any(n * q.itemsize % 16 for n in q.stride()[:2]) or q.data_ptr() % 16:
        q = q.clone(memory_format=torch.contiguous_format)
    sinks = scoring.sinks
    if sinks is not None:
        sinks = sinks.resolve_neg().to(torch.float32).contiguous()
    table = batch.table(tier).page_table
    table = table if table.stride(1) == 1 else table.contiguous()
    offsets, lengths = batch.query_offsets.contiguous(), batch.seq_lens.contiguous()
    rows = shape.rows
    reach = min(table.shape[1] * page_tokens, WIDEST)
    window = 0 if scoring.window is None or scoring.window > WIDEST else scoring.window
    wide = k_cache.spec.row_bytes(dim) + v_cache.spec.row_bytes(dim) >= WIDE_VALUE_BYTES * 2 * dim
    available = processors(q.device)
    wanted = items.wanted(batch.usual_requests, kv_heads, group, available, wide=wide)
    chunks = items.most_chunks(reach, window or None, num_tokens, wanted)
    groups = min(num_tokens * -(-group // rows), batch.num_requests + num_tokens * group // rows)
    pieces = max(1, chunks * groups)  # of a KV head; padding alone is blanked by a block, too
    merged = chunks > 1
    partial = q.new_empty(pieces, kv_heads, rows, dim, dtype=torch.float32) if merged else None
    partial_lse = q.new_empty(kv_heads, rows, pieces, dtype=torch.float32) if merged else None
    given = arguments.Arguments(
        k=arguments.cache(k_cache),
        v=arguments.cache(v_cache),
        q=q.data_ptr(),
        q_token=q.stride(0),
        q_head=q.stride(1),
        out=out.data_ptr(),
        out_token=out.stride(0),
        out_head=out.stride(1),
        query_offsets=offsets.data_ptr(),
        seq_lens=lengths.data_ptr(),
        page_table=table.data_ptr(),
        table_row=table.stride(0),
        turns=quaternions(q.device).data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        partial=None if partial is None else partial.data_ptr(),
        partial_lse=None if partial_lse is None else partial_lse.data_ptr(),
        num_pages=num_pages,
        num_requests=batch.num_requests,
        num_tokens=num_tokens,
        kv_heads=kv_heads,
        group=group,
        page_shift=page_tokens.bit_length() - 1,
        capacity=pieces,
        reach=reach,
        wanted=wanted,
        window=window,
        score_scale=scoring.scale * (1.0 if scoring.softcap else LOG2_E),
        softcap=scoring.softcap or 0.0,
    )
    launches.record("cuda", "decode")
    # Warps that every KV head has as many of, in as many blocks as there can be.
    runs = min(pieces, max(1, kernels.resident * shape.warps // kv_heads))
    blocks = max(min(kernels.resident, runs * kv_heads), -(-runs * kv_heads // shape.warps))
    kernels.decode.launch_beside((blocks,), shape.threads, kernels.shared_bytes, (given,))
    if merged:
        # As many warps as there may be while all blocks run at once, for the same bits.
        parts = num_tokens * q_heads * -(-dim // MERGE_WIDTH)
        merge = next((m for m in kernels.merges if parts <= m.resident), kernels.merges[-1])
        merge.function.launch_beside((parts,), merge.threads, merge.shared_bytes, (given,))
    return out


def check(q: torch.Tensor, k_cache: Encoded, v_cache: Encoded, batch: Batch) -> None:
    """`UnsupportedError` for what the kernels are not made for, whatever the table says."""
    if q.dtype != torch.bfloat16 and "bf16" in (k_cache.spec.name, v_cache.spec.name):
        raise UnsupportedError(
            f"cuda multiplies bf16 rows with bf16 queries only, got {q.dtype}; triton takes them"
        )
    if k_cache.dim != v_cache.dim:
        raise UnsupportedError(
            f"cuda takes keys and values of one head_dim, got {k_cache.dim} and {v_cache.dim}; "
            "triton takes both"
        )
    if batch.any_cut:
        raise UnsupportedError(
            "cuda cuts a request into chunks by its length, so that a query's bits depend on its "
            "step; triton serves batches of any_cut"
        )


@dataclass(frozen=True, slots=True)
class Merge:
    """The merge with so many threads a row.

    Attributes
    ----------
    function : the kernel
    threads, shared_bytes : of a block
    resident : blocks that the device holds at once
    """

    function: Function
    threads: int
    shared_bytes: int
    resident: int


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a call launches.

    Attributes
    ----------
    decode : the kernel of pieces
    merges : those of their results, of more threads a row first
    shared_bytes : that a block of decode takes
    resident : blocks of decode that the device holds at once
    """

    decode: Function
    merges: tuple[Merge, ...]
    shared_bytes: int
    resident: int


@cache
def picked(k: str, v: str, dim: int, rows: int, device: torch.device) -> shapes.Shape:
    """The launch shape for a device."""
    found = torch.cuda.get_device_properties(device)
    return shapes.pick(sizes(k, v, dim), rows, found.shared_memory_per_multiprocessor)


@cache
def load(
    k: str,
    v: str,
    dim: int,
    dtype: torch.dtype,
    shape: shapes.Shape,
    softcap: bool,
    one_tile: bool,
    device: torch.device,
) -> Kernels:
    """The kernels for a device, compiled when they are first asked for."""
    given = defines(k, v, dim, dtype, shape, softcap, one_tile)
    step = function(source("decode.cu", given), "decode", device)
    shared_bytes = given["SET_SHARED_BYTES"]
    held = step.resident_blocks(shape.threads, shared_bytes)
    held *= processors(device)
    merges = tuple(load_merge(v, dim, dtype, shape.rows, n, device) for n in MERGE_WARPS)
    return Kernels(step, merges, shared_bytes, held)


def load_merge(
    v: str, dim: int, dtype: torch.dtype, rows: int, warps: int, device: torch.device
) -> Merge:
    """The merge with so many warps a row for a device."""
    made = function(source("merge.cu", merge_defines(v, dim, dtype, rows, warps)), "merge", device)
    threads, shared_bytes = warps * shapes.WARP, merge_shared_bytes(dim, warps)
    held = made.resident_blocks(threads, shared_bytes)
    held *= processors(device)
    return Merge(made, threads, shared_bytes, held)


def sizes(k: str, v: str, dim: int) -> shapes.Sizes:
    """Of what a block goes through."""
    specs = [kvq_codecs.get(name).spec for name in (k, v)]
    rows = [{plane.name: plane.row_bytes(dim) for plane in spec.planes} for spec in specs]
    lanes = 0
    for name, row_bytes in zip((k, v), rows, strict=True):
        # A tile's code rows are many runs of 16 bytes, its other planes' few.
        codes = formats.get(name).codes
        lanes += sum(
            shapes.WARP if plane == codes else min(shapes.WARP, count * items.TILE // 16)
            for plane, count in row_bytes.items()
        )
    token_bytes = sum(sum(row_bytes.values()) for row_bytes in rows)
    table_bytes = max(formats.get(name).table_bytes for name in (k, v))
    return shapes.Sizes(dim, token_bytes, lanes, table_bytes)


def defines(
    k: str,
    v: str,
    dim: int,
    dtype: torch.dtype,
    shape: shapes.Shape,
    softcap: bool,
    one_tile: bool,
) -> dict[str, Any]:
    """What decode is compiled with."""
    key, value = formats.get(k), formats.get(v)
    types = {k: key.type, v: value.type}
    if shape.tabled:
        name = max((k, v), key=lambda name: formats.get(name).table_bytes)
        types[name] = str(formats.get(name).tabled)
    return {
        "SET_K": types[k],
        "SET_V": types[v],
        "K_HEADER": f'"{key.header}"',
        "V_HEADER": f'"{value.header}"',
        "SET_ROWS": shape.rows,
        "SET_TILES": shape.tiles,
        "SET_STAGES": shape.stages,
        "SET_BLOCKS": shape.blocks,
        "SET_WARPS": shape.warps,
        "SET_SOFTCAP": int(softcap),
        "SET_ONE_TILE": int(one_tile),
        "SET_SHARED_BYTES": shape.shared_bytes(sizes(k, v, dim)),
        **_common(dim, dtype),
    }


def merge_defines(v: str, dim: int, dtype: torch.dtype, rows: int, warps: int) -> dict[str, Any]:
    """What the merge is compiled with."""
    return {
        "SET_ROWS": rows,
        "SET_WARPS": warps,
        "SET_RUN": MERGE_RUN,
        "SET_ROTATED": int(formats.get(v).rotated),
        **_common(dim, dtype),
    }


def merge_shared_bytes(dim: int, warps: int) -> int:
    """Shared memory of a merge's block: sums of runs, and their weights."""
    runs = -(-items.MOST_CHUNKS // MERGE_RUN)
    return runs * (min(dim, MERGE_WIDTH) + 1) * 4 if warps > 1 else 0


def _common(dim: int, dtype: torch.dtype) -> dict[str, Any]:
    return {"SET_DIM": dim, "NUMBER": NUMBERS[dtype], **items.constants()}
