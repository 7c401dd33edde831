"""Decode over a cache of one format; and torch's own attention over the same rows unpacked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvq_attention import Batch, ops
from kvq_attention.bench.cases import Case, Spot
from kvq_attention.bench.checks import decode_error
from kvq_attention.bench.data import TIER, Pool, batches, calls_for, empty_pool, fill, random_rows
from kvq_attention.bench.plan import BASELINE, Plan
from kvq_attention.bench.rows import Ceilings, Row, moved, run_and_time, significant, timed
from kvq_attention.bench.timing import time_calls


@dataclass(frozen=True, slots=True, eq=False)
class _Steps:
    """Decode steps over pages of their own in one pool, and what they gave.

    Attributes
    ----------
    q : [B, Hq, D], the same in every step
    outs : step → [B, Hq, D], of the last time that it ran
    """

    spot: Spot
    case: Case
    pool: Pool
    batches: list[Batch]
    q: torch.Tensor
    outs: dict[int, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def make(cls, plan: Plan, case: Case, spot: Spot, count: int) -> _Steps:
        random, shape = torch.Generator(plan.device).manual_seed(0), spot.shape
        steps = batches(case, spot.page_tokens, count, random)
        pages = sum(batch.table(TIER).page_table.numel() for batch in steps)
        pool = empty_pool(spot.formats, shape, pages, spot.page_tokens, plan.device)
        fill(pool, shape, plan.store_told(spot), random)
        q = random_rows(case.batch, shape, shape.heads, random)
        return cls(spot, case, pool, steps, q)

    def calls(self, step: Callable[[int], torch.Tensor]) -> list[Callable[[], None]]:
        """One call a step, that keeps what `step` returns."""

        def call(index: int) -> Callable[[], None]:
            return lambda: self.outs.update({index: step(index)})

        return [call(index) for index in range(len(self.batches))]

    def error(self) -> float | None:
        """The largest of the first and the last step; None if an output is not finite."""
        errors = [
            decode_error(
                self.q, self.outs[i], self.pool, self.batches[i], self.case, self.spot.shape
            )
            for i in {0, len(self.batches) - 1}
        ]
        return significant(max(errors)) if max(errors) < torch.inf else None


def decode_row(plan: Plan, case: Case, spot: Spot, told: str, ceilings: Ceilings) -> Row:
    """One format on one backend at one case: time, GB/s as stored, error.

    told : "auto" or the backend's name
    """
    call_bytes = case.tokens * spot.formats.token_bytes(spot.shape)
    steps = _Steps.make(plan, case, spot, calls_for(call_bytes, plan.device))

    def step(index: int) -> torch.Tensor:
        return ops.decode(
            *(steps.q, steps.pool.k, steps.pool.v, steps.batches[index], TIER),
            scale=spot.shape.dim**-0.5,
            backend=told,
        )

    backend, timing = run_and_time("decode", steps.calls(step), plan.device, plan.repeat)
    return {
        "case": case.name,
        "shape": spot.shape.name,
        "page_tokens": spot.page_tokens,
        "codec": spot.formats.name,
        "backend": backend,
        **timed(timing),
        **moved(timing, call_bytes, ceilings.read, "read"),
        "error": steps.error(),
    }


def sdpa_row(plan: Plan, case: Case, ceilings: Ceilings) -> Row:
    """torch's flash attention over bf16 keys and values that lie in one piece, not in pages."""
    spot = Spot(plan.shapes[0], min(plan.page_tokens), BASELINE)
    call_bytes = case.tokens * BASELINE.token_bytes(spot.shape)
    count = calls_for(2 * call_bytes, plan.device)  # the pages, and the same rows once more
    steps = _Steps.make(plan, case, spot, count)
    rows = [
        [
            _in_one_piece(cache.planes["values"], batch)[:, :, : case.context]
            for batch in steps.batches
        ]
        for cache in (steps.pool.k, steps.pool.v)
    ]

    def step(index: int) -> torch.Tensor:
        k, v = (each[index] for each in rows)
        q = steps.q[:, :, None]  # [B, Hq, 1, D]
        return scaled_dot_product_attention(q, k, v, enable_gqa=True)[:, :, 0]

    calls = steps.calls(step)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for call in calls:
            call()
        timing = time_calls(calls, plan.device, plan.repeat, graph=True)
    return {
        "case": case.name,
        "shape": spot.shape.name,
        "peer": "torch flash SDPA over contiguous bf16",
        **timed(timing),
        **moved(timing, call_bytes, ceilings.read, "read"),
        "error": steps.error(),
    }


def _in_one_piece(plane: torch.Tensor, batch: Batch) -> torch.Tensor:
    """bf16 rows of a plane [P, Hkv, N, D]: [B, Hkv, pages · N, D]."""
    pages = plane.view(torch.bfloat16)[batch.table(TIER).page_table.long()]
    return pages.transpose(1, 2).flatten(2, 3)
