"""The kernels of a plan, compiled before anything is timed."""

from __future__ import annotations

import torch

from kvq_attention import Batch, Table, compiling, ops
from kvq_attention.bench.cases import Case, Spot
from kvq_attention.bench.data import TIER, Pool, empty_pool, fill, random_rows
from kvq_attention.bench.extend import routes, with_host
from kvq_attention.bench.plan import Plan

# Triton compiles anew for counts that 16 does not divide; those of the measurements are multiples.
PAGES = 64


def compile_ahead(plan: Plan, jobs: int) -> None:
    """Run every op once at every shape of the plan, on a pool of a few pages, in `jobs` processes.

    A kernel that fails here fails again where it is measured, and is reported there.
    """
    compiling.ahead(jobs, run_once, [(plan, spot) for spot in plan.spots])


def run_once(plan: Plan, spot: Spot) -> None:
    """On every backend what the plan measures: a store, a decode or an extend a case, a copy."""
    random, shape = torch.Generator(plan.device).manual_seed(0), spot.shape
    pool = empty_pool(spot.formats, shape, PAGES, spot.page_tokens, plan.device)
    for told in plan.ways("store", spot).values():
        fill(pool, shape, told, random)
    for told in plan.ways("decode", spot).values():
        for case in plan.cases:
            q = random_rows(case.batch, shape, shape.heads, random)
            batch = _first_page_only(case, pool)
            ops.decode(q, pool.k, pool.v, batch, TIER, scale=shape.dim**-0.5, backend=told)
    for step in plan.extends:
        q, k, v = (
            random_rows(step.tokens, shape, heads, random)
            for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
        )
        batch = _first_page_only(Case(1, step.context), pool, step.tokens)
        for backend, told in plan.ways("extend", spot).items():
            for route in routes(backend, spot.formats).values():
                ops.extend(
                    *(q, k, v, pool.k, pool.v, with_host(batch), TIER),
                    scale=shape.dim**-0.5,
                    route=route,
                    backend=told,
                )
    sources, targets = torch.arange(PAGES, device=plan.device).view(2, -1)
    for told in plan.ways("copy_pages", spot).values() if "copy_pages" in plan.ops else ():
        ops.copy_pages((pool.k, pool.v), sources, targets, backend=told)


def _first_page_only(case: Case, pool: Pool, queries: int = 1) -> Batch:
    """The case's batch with page 0 in every place: the shapes count, and no memory is needed."""
    page_tokens, device = pool.k.lead[2], next(iter(pool.k.planes.values())).device
    columns = -(-case.context // page_tokens)
    table = torch.zeros(case.batch, columns, dtype=torch.int32, device=device)
    return Batch(
        queries * torch.arange(case.batch + 1, dtype=torch.int32, device=device),
        torch.full((case.batch,), case.context, dtype=torch.int32, device=device),
        {TIER: Table(table, torch.zeros(case.batch * queries, dtype=torch.int64, device=device))},
        page_tokens,
        usual_requests=case.batch,
    )
