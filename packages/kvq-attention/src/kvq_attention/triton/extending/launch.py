"""Extend: attention over a step's own rows and the packed tokens before them."""

from __future__ import annotations

import torch

from kvq_attention import launches
from kvq_attention.batch import Batch
from kvq_attention.scoring import Scoring
from kvq_attention.triton.extending import routes
from kvq_attention.triton.extending.scratch import extend_through
from kvq_attention.triton.extending.step import Step
from kvq_attention.triton.extending.within import extend_within
from kvq_attention.triton.side import Side
from kvq_codecs import Encoded


def extend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: Encoded,
    v_cache: Encoded,
    batch: Batch,
    tier: str,
    scoring: Scoring,
    scratch_bytes: int,
) -> torch.Tensor:
    """Attend over the step's own rows and the cache: see `kvq_attention.ops.extend`."""
    sides = Side.of(k_cache, q.dtype), Side.of(v_cache, q.dtype)
    step = Step.of(q, k, v, sides, batch, tier, scoring)
    if step.out.numel() == 0:
        return step.out
    launches.record("triton", "extend")
    num_pages = k_cache.lead[0]
    formats = k_cache.spec.name, v_cache.spec.name
    route = routes.choose(
        formats,
        (k_cache.dim, v_cache.dim),
        num_tokens=step.num_tokens,
        requests=step.num_requests,
        kv_heads=step.kv_heads,
        group=step.group,
        visible=step.visible,
        tile=step.shape.tokens,
        scratch_bytes=scratch_bytes,
    )
    if route.fewest != 1:
        extend_within(step, *sides, num_pages, max(0, route.fewest - 1))
    if route.plan is not None:
        packed = routes.packed(formats)
        extend_through(step, sides, packed, num_pages, route.requests, route.plan, route.fewest)
    return step.out
