"""Store of a step's rows, and copies of pages: bytes read and written."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvq_attention import ops
from kvq_attention.bench.cases import Spot
from kvq_attention.bench.checks import stored_exactly
from kvq_attention.bench.data import calls_for, empty_pool, fill, random_rows, row_bytes
from kvq_attention.bench.plan import Plan
from kvq_attention.bench.rows import Ceilings, Row, moved, run_and_time, timed

MAX_CALLS = 64


def store_row(plan: Plan, tokens: int, spot: Spot, told: str, ceilings: Ceilings) -> Row:
    """bf16 K and V rows of `tokens` tokens into pages in random order; told: "auto" or a name."""
    shape, page_tokens, formats = spot.shape, spot.page_tokens, spot.formats
    random = torch.Generator(plan.device).manual_seed(0)
    given = 2 * tokens * shape.kv_heads * shape.dim * torch.bfloat16.itemsize
    call_bytes = given + tokens * formats.token_bytes(shape)
    count = calls_for(call_bytes, plan.device, MAX_CALLS)
    k, v = (random_rows(count * tokens, shape, shape.kv_heads, random) for _ in "kv")
    pages = -(-count * tokens // page_tokens)
    order = torch.randperm(pages, generator=random, device=plan.device)
    slots = order[:, None] * page_tokens + torch.arange(page_tokens, device=plan.device)
    slots = slots.flatten()[: count * tokens]
    pool = empty_pool(formats, shape, pages, page_tokens, plan.device)

    def call(part: slice) -> Callable[[], None]:
        return lambda: ops.store(k[part], v[part], pool.k, pool.v, slots[part], backend=told)

    calls = [call(slice(start, start + tokens)) for start in range(0, count * tokens, tokens)]
    backend, timing = run_and_time("store", calls, plan.device, plan.repeat)
    return {
        "tokens": tokens,
        "shape": shape.name,
        "codec": formats.name,
        "backend": backend,
        **timed(timing),
        **moved(timing, call_bytes, ceilings.copy, "copy"),
        "exact": stored_exactly(pool, slots, ((pool.k, k), (pool.v, v))),
    }


def copy_row(plan: Plan, tokens: int, spot: Spot, told: str, ceilings: Ceilings) -> Row:
    """Pages that hold `tokens` tokens of K and V, to other pages, both in random order."""
    shape, page_tokens, formats = spot.shape, spot.page_tokens, spot.formats
    random = torch.Generator(plan.device).manual_seed(0)
    pages = -(-tokens // page_tokens)
    call_bytes = 2 * pages * page_tokens * formats.token_bytes(shape)
    count = calls_for(call_bytes, plan.device, MAX_CALLS)
    pool = empty_pool(formats, shape, 2 * count * pages, page_tokens, plan.device)
    fill(pool, shape, plan.store_told(spot), random)
    order = torch.randperm(2 * count * pages, generator=random, device=plan.device)
    sources, targets = order.view(2, count, pages)

    def call(index: int) -> Callable[[], None]:
        return lambda: ops.copy_pages(
            (pool.k, pool.v), sources[index], targets[index], backend=told
        )

    backend, timing = run_and_time(
        "copy_pages", [call(index) for index in range(count)], plan.device, plan.repeat
    )
    first, second = (x[0] * page_tokens for x in (sources, targets))
    exact = all(
        torch.equal(row_bytes(plane, first), row_bytes(plane, second))
        for cache in (pool.k, pool.v)
        for plane in cache.planes.values()
    )
    return {
        "pages": pages,
        "page_tokens": page_tokens,
        "shape": shape.name,
        "codec": formats.name,
        "backend": backend,
        **timed(timing),
        **moved(timing, call_bytes, ceilings.copy, "copy"),
        "exact": exact,
    }
