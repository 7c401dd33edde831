"""Extend: new tokens over a packed past; and what others take for the same rows unpacked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvq_attention import Batch, Table, ops
from kvq_attention.accuracy import relative_error
from kvq_attention.bench.cases import Extend, Formats, Spot
from kvq_attention.bench.checks import decoded
from kvq_attention.bench.data import TIER, Pool, empty_pool, fill, random_rows
from kvq_attention.bench.plan import BASELINE, Plan
from kvq_attention.bench.rows import Ceilings, Row, run_and_time, significant, timed
from kvq_attention.bench.timing import issue_us, time_calls
from kvq_attention.routes import PLAIN, SCRATCH, Route

# Steps of a group: each has pages and rows of its own.
CALLS = 4
# As the backend chooses by the sizes of a request; all others are its routes' names.
CHOSEN = "chosen"

Step = Callable[[int], torch.Tensor]


def routes(backend: str, formats: Formats) -> dict[str, Route | None]:
    """How a past of these formats can be read: as the backend chooses, and by each of its ways."""
    ways = {route.name: Route(route.name) for route in ops.extend_routes(backend)}
    if formats.k in PLAIN and formats.v in PLAIN:
        ways.pop(SCRATCH, None)  # which would hold copies of rows that are read as they are
    return {CHOSEN: None, **ways}


def with_host(batch: Batch) -> Batch:
    """The batch as a scheduler makes it, who knows its sizes."""
    return replace(batch, host=tuple(batch.requests()))


@dataclass(frozen=True, slots=True, eq=False)
class _Steps:
    """Steps of one request over pages of their own in one pool, and what they gave.

    Attributes
    ----------
    q, k, v : [calls, T, heads, D]
    outs : step → [T, Hq, D], of the last time that it ran
    """

    spot: Spot
    case: Extend
    pool: Pool
    batches: list[Batch]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    outs: dict[int, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def make(cls, plan: Plan, case: Extend, spot: Spot) -> _Steps:
        random, shape = torch.Generator(plan.device).manual_seed(0), spot.shape
        columns = -(-case.context // spot.page_tokens)
        order = torch.randperm(CALLS * columns, generator=random, device=plan.device)
        offsets = torch.tensor([0, case.tokens], dtype=torch.int32, device=plan.device)
        length = torch.tensor([case.context], dtype=torch.int32, device=plan.device)
        unstored = torch.full((case.tokens,), -1, device=plan.device)
        made = [
            Batch(offsets, length, {TIER: Table(pages[None].int(), unstored)}, spot.page_tokens)
            for pages in order.view(CALLS, columns)
        ]
        pool = empty_pool(spot.formats, shape, len(order), spot.page_tokens, plan.device)
        fill(pool, shape, plan.store_told(spot), random)
        rows = [
            random_rows(CALLS * case.tokens, shape, heads, random).view(
                CALLS, case.tokens, heads, shape.dim
            )
            for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
        ]
        q, k, v = rows
        return cls(spot, case, pool, made, q, k, v)

    def calls(self, step: Step) -> list[Callable[[], None]]:
        """One call a step, that keeps what `step` returns."""

        def call(index: int) -> Callable[[], None]:
            return lambda: self.outs.update({index: step(index)})

        return [call(index) for index in range(CALLS)]

    def whole(self, index: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values of a KV head: the decoded past, and the step's as they came."""
        pages = self.batches[index].table(TIER).page_table[0].long()
        k, v = (
            torch.cat([decoded(cache, head, pages)[: self.case.past], new[index, :, head].double()])
            for cache, new in ((self.pool.k, self.k), (self.pool.v, self.v))
        )
        return k, v

    def error(self) -> float | None:
        """The largest of a few heads and queries against float64; None if one is not finite."""
        out, shape = self.outs[0], self.spot.shape
        if not bool(torch.isfinite(out).all()):
            return None
        errors = []
        for head in dict.fromkeys((0, shape.heads - 1)):
            k, v = self.whole(0, head * shape.kv_heads // shape.heads)
            for token in dict.fromkeys((0, self.case.tokens // 2, self.case.tokens - 1)):
                seen = self.case.past + token + 1
                scores = k[:seen] @ self.q[0, token, head].double() * shape.dim**-0.5
                expected = scores.softmax(dim=0) @ v[:seen]
                errors.append(relative_error(out[token, head], expected))
        return significant(max(errors))


def extend_row(
    plan: Plan,
    case: Extend,
    route: tuple[str, Route | None],
    spot: Spot,
    told: str,
    ceilings: Ceilings,
) -> Row:
    """One format on one backend at one case: time, what issuing a call takes, products, error.

    route : of `routes`
    told : "auto" or the backend's name
    """
    steps = _Steps.make(plan, case, spot)
    batches = [with_host(batch) for batch in steps.batches]
    name, way = route

    def step(index: int) -> torch.Tensor:
        q, k, v = steps.q[index], steps.k[index], steps.v[index]
        cached = steps.pool.k, steps.pool.v, batches[index], TIER
        return ops.extend(*(q, k, v, *cached), scale=spot.shape.dim**-0.5, route=way, backend=told)

    backend, timing = run_and_time("extend", steps.calls(step), plan.device, plan.repeat)
    return {
        "case": case.name,
        "shape": spot.shape.name,
        "page_tokens": spot.page_tokens,
        "codec": spot.formats.name,
        "backend": backend,
        "route": name,
        **timed(timing),
        "issue_us": issue_us(steps.calls(step), plan.device, plan.repeat),
        "tflop_per_s": round(case.flops(spot.shape) / timing.us / 1e6, 2),
        "error": steps.error(),
    }


def peer_row(plan: Plan, case: Extend, peer: str, ceilings: Ceilings) -> Row:
    """Another's attention over bf16 keys and values that lie in one piece, not in pages."""
    spot = Spot(plan.shapes[0], min(plan.page_tokens), BASELINE)
    steps = _Steps.make(plan, case, spot)
    heads = range(spot.shape.kv_heads)
    rows = []
    for index in range(CALLS):
        pairs = [steps.whole(index, head) for head in heads]
        rows.append([torch.stack(part, dim=1).bfloat16() for part in zip(*pairs, strict=True)])
    step = PEERS[peer](steps, rows)
    calls = steps.calls(step)
    for call in calls:
        call()
    timing = time_calls(calls, plan.device, plan.repeat, graph=True)
    return {
        "case": case.name,
        "shape": spot.shape.name,
        "peer": peer,
        **timed(timing),
        "tflop_per_s": round(case.flops(spot.shape) / timing.us / 1e6, 2),
        "error": steps.error(),
    }


def peers() -> list[str]:
    """What is there to compare with."""
    return [name for name in PEERS if name == SDPA or find_spec("flashinfer") is not None]


def _sdpa(steps: _Steps, rows: list[list[torch.Tensor]]) -> Step:
    # With it comes torch's whole compiler, a second that other commands would wait for as well.
    from torch.nn.attention.bias import causal_lower_right

    group = steps.spot.shape.heads // steps.spot.shape.kv_heads
    mask = causal_lower_right(steps.case.tokens, steps.case.context)
    # its masks know no grouped heads
    wide = [[x.repeat_interleave(group, dim=1).transpose(0, 1)[None] for x in r] for r in rows]

    def step(index: int) -> torch.Tensor:
        q = steps.q[index].transpose(0, 1)[None]
        k, v = wide[index]
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out[0].transpose(0, 1)

    return step


def _flashinfer(backend: str) -> Callable[[_Steps, list[list[torch.Tensor]]], Step]:
    def make(steps: _Steps, rows: list[list[torch.Tensor]]) -> Step:
        prefill: Any = import_module("flashinfer").single_prefill_with_kv_cache
        return lambda index: prefill(steps.q[index], *rows[index], causal=True, backend=backend)

    return make


SDPA = "torch flash SDPA over contiguous bf16"
PEERS = {
    SDPA: _sdpa,
    "FlashInfer fa2 over contiguous bf16": _flashinfer("fa2"),
    "FlashInfer fa3 over contiguous bf16": _flashinfer("fa3"),
}
