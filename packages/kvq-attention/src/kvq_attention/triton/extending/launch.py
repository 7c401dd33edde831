"""Extend: attention over a step's own rows and the packed tokens before them."""

from __future__ import annotations

from itertools import groupby

import torch

from kvq_attention import launches
from kvq_attention.batch import Batch
from kvq_attention.scoring import Scoring
from kvq_attention.triton.extending import dense, routes
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
    known = batch.host and dense.choose(step, sides, formats, batch.host, scratch_bytes)
    if not known or not batch.host:
        _by_rows(step, sides, num_pages, formats, scratch_bytes)
        return step.out
    for densely, found in groupby(batch.host, lambda request: request in known.requests):
        requests = list(found)
        first, last = requests[0], requests[-1]
        if densely:
            for request in requests:
                dense.extend_densely(step, sides, num_pages, request, known, scratch_bytes)
        else:
            some = step.requests(first.index, first.start, len(requests), last.stop)
            _by_rows(some, sides, num_pages, formats, scratch_bytes)
    step.out[batch.host[-1].stop :] = 0  # padding
    return step.out


def _by_rows(
    step: Step,
    sides: tuple[Side, Side],
    num_pages: int,
    formats: tuple[str, str],
    scratch_bytes: int,
) -> None:
    """Write the results of requests by their query rows, which the device knows."""
    route = routes.choose(
        formats,
        (sides[0].dim, sides[1].dim),
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
