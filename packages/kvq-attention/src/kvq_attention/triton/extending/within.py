"""The route within the loop: each tile of the packed past is decoded by every row tile."""

from __future__ import annotations

import torch

from kvq_attention.triton.extending import shapes
from kvq_attention.triton.extending.merge import merge_parts
from kvq_attention.triton.extending.step import Step, attend
from kvq_attention.triton.side import Side

# Query rows that a program of the merge takes
MERGED_LINES = 16


def extend_within(step: Step, k: Side, v: Side, num_pages: int, most: int) -> None:
    """Write the results of requests of `most` query rows a KV head at most; 0 = of all."""
    items, capacity = shapes.most_items(
        step.num_tokens, step.num_requests, step.group, step.visible, step.shape.rows
    )
    kept_rows = max(1, capacity * step.kv_heads)
    kept = step.q.new_empty(kept_rows, v.dim, dtype=torch.float32)
    kept_weights = step.q.new_empty(kept_rows, dtype=torch.float32)
    least_part = shapes.LEAST_PART if capacity > 0 else 0
    attend(
        *(step, k, v, items, kept, kept_weights),
        num_pages=num_pages,
        capacity=capacity,
        most=most,
        least_part=least_part,
    )
    if not capacity:
        return
    sinks = step.scoring.sinks
    lines = step.num_tokens * step.group
    merge_parts[(-(-lines // MERGED_LINES), step.kv_heads)](
        kept,
        kept_weights,
        step.query_offsets,
        step.seq_lens,
        kept_weights if sinks is None else sinks,
        step.out,
        *step.out.stride()[:2],
        step.num_requests,
        step.num_tokens,
        capacity,
        step.reach,
        step.window or 0,
        **step.common,
        V_DIM=v.dim,
        V_WIDTH=v.columns * v.tile.split,
        KV_HEADS=step.kv_heads,
        LINES=MERGED_LINES,
        MOST=most,
        LEAST_PART=least_part,
        SINKS=sinks is not None,
    )
