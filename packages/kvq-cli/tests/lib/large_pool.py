"""A pool of 262k tokens for a hybrid model: the memory it takes, what its last pages hold."""

from __future__ import annotations

import psutil
import torch
from own_process import own_bytes
from published import CONFIGS

from kvq_attention import Batch, Table, ops
from kvq_cli.config import CacheFormat, build_plan, geometry
from kvq_pools import Pool, PoolPlan, slots

HYBRID = geometry(CONFIGS["qwen3.5-35b-a3b"])  # 10 of 40 layers keep keys: 2 heads × 256
PAGE_TOKENS = 16
GIB = 1 << 30


def hybrid_plan(codec: str) -> PoolPlan:
    return build_plan(
        HYBRID,
        CacheFormat(codec, codec),
        page_tokens=PAGE_TOKENS,
        max_running_requests=1,
        max_prefill_tokens=512,
    )


def check_real_memory(plan: PoolPlan, pages: int) -> None:
    """The process takes a pool's bytes and no more, and can use its first and last pages."""
    before = own_bytes(psutil.Process())
    pool = Pool(
        plan,
        pages,
        empty=lambda shape, kind: torch.empty(shape, dtype=getattr(torch, kind)),
    )
    taken = own_bytes(psutil.Process()) - before
    assert pool.nbytes == plan.nbytes(pages)
    # nothing beside the pool grows with it; what of it were not there would show as well
    assert abs(taken - pool.nbytes) < 16 << 20, f"{taken:,} of {pool.nbytes:,} bytes"
    first, last = HYBRID.cached_layers[0], HYBRID.cached_layers[-1]
    outputs = [attend(pool, layer, [page]) for layer in (first, last) for page in (0, pages - 1)]
    assert all(torch.equal(out, outputs[0]) for out in outputs)
    assert attend(pool, first, [pages - 2, pages - 1]).isfinite().all()


def attend(pool: Pool, layer: int, table: list[int]) -> torch.Tensor:
    """Store a page's tokens, the same ones in each page of `table`; what the last one reads."""
    torch.manual_seed(0)
    count = PAGE_TOKENS * len(table)
    k, v = (torch.randn(PAGE_TOKENS, 2, 256).repeat(len(table), 1, 1) for _ in "kv")
    caches = pool.view("k", layer), pool.view("v", layer)
    places = torch.from_numpy(slots(table, 0, count, PAGE_TOKENS))
    ops.store(k, v, *caches, places, backend="reference")
    batch = Batch(
        query_offsets=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([count], dtype=torch.int32),
        tables={
            "full": Table(
                page_table=torch.tensor([table], dtype=torch.int32), slot_mapping=places[-1:]
            )
        },
        page_tokens=PAGE_TOKENS,
    )
    q = torch.randn(1, 16, 256)
    return ops.decode(q, *caches, batch, "full", scale=256**-0.5, backend="reference")
