"""Paged memory for quantized KV caches: what the bytes cost and where they live.

>>> import kvq_codecs, kvq_pools
>>> q8, q4 = kvq_codecs.get("q8_0").spec, kvq_codecs.get("q4_0").spec
>>> plan = kvq_pools.mha(layers=range(30), kv_heads=3, head_dim=64, k=q8, v=q4, page_tokens=16)
>>> plan.token_bytes
9360.0
>>> plan.pages_for(64 * 2**20)
447
>>> pool = kvq_pools.Pool(plan, num_pages=447)
>>> pool.nbytes == plan.nbytes(447)
True
>>> sequence = kvq_pools.CacheSpace(plan, pool.num_pages).open()
>>> sequence.grow(20)
>>> sequence.slots("full", 14, 18)
array([14, 15, 16, 17])
>>> pool.view("v", layer=29).shape
(448, 3, 16, 64)
"""

from kvq_pools.budget import Budget, smallest
from kvq_pools.errors import (
    BudgetError,
    IntegrityError,
    OutOfPages,
    PageError,
    PlanError,
    PoolFailed,
    RebuildFailed,
    RebuildRejected,
)
from kvq_pools.families import Layout, dsa, heads_per_rank, hybrid_swa, mha, mla, qsa
from kvq_pools.pages import PageAllocator, pages_for_tokens, slots
from kvq_pools.plan import PoolPlan, Scope, Slab, Tier
from kvq_pools.pool import Pool
from kvq_pools.prefix import PrefixHit, PrefixStats
from kvq_pools.rebuild import Rebuilt, rebuild
from kvq_pools.sequences import SequencePages
from kvq_pools.snapshots import SnapshotStats
from kvq_pools.space import CacheSpace
from kvq_pools.window import first_visible, window_pages_per_request

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "BudgetError",
    "CacheSpace",
    "IntegrityError",
    "Layout",
    "OutOfPages",
    "PageAllocator",
    "PageError",
    "PlanError",
    "Pool",
    "PoolFailed",
    "PoolPlan",
    "PrefixHit",
    "PrefixStats",
    "RebuildFailed",
    "RebuildRejected",
    "Rebuilt",
    "Scope",
    "SequencePages",
    "Slab",
    "SnapshotStats",
    "Tier",
    "__version__",
    "dsa",
    "first_visible",
    "heads_per_rank",
    "hybrid_swa",
    "mha",
    "mla",
    "pages_for_tokens",
    "qsa",
    "rebuild",
    "slots",
    "smallest",
    "window_pages_per_request",
]
