"""`python -m kvq_attention.bench.profiled FORMAT`: one decode for a profiler to look at.

It is the only work between the profiler's start and stop, which `ncu --profile-from-start off` and
`nsys --capture-range cudaProfilerApi` wait for: the cache is filled and the kernels are compiled
before.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch

from kvq_attention import ops, support
from kvq_attention.bench.cases import (
    Case,
    Formats,
    Shape,
    Spot,
    parse_cases,
    parse_counts,
    parse_formats,
    parse_shapes,
)
from kvq_attention.bench.data import TIER, batches, calls_for, empty_pool, fill, random_rows
from kvq_attention.bench.plan import DEFAULTS, DEVICES, Plan, plan
from kvq_attention.errors import AttentionError
from kvq_codecs import CodecError

profiler: Any = torch.cuda.profiler


def decode_once(plan: Plan, case: Case, spot: Spot) -> torch.Tensor:
    """Decode twice over one cache, the second time under the profiler; what that gives.

    Raises `AttentionError` when the device has no room for the cache.
    """
    calls_for(case.tokens * spot.formats.token_bytes(spot.shape), plan.device, 1)
    random, shape = torch.Generator(plan.device).manual_seed(0), spot.shape
    (batch,) = batches(case, spot.page_tokens, 1, random)
    pages = batch.table(TIER).page_table.numel()
    pool = empty_pool(spot.formats, shape, pages, spot.page_tokens, plan.device)
    fill(pool, shape, plan.store_told(spot), random)
    q = random_rows(case.batch, shape, shape.heads, random)
    (told,) = plan.told("decode")

    def decode() -> torch.Tensor:
        scale = shape.dim**-0.5
        return ops.decode(q, pool.k, pool.v, batch, TIER, scale=scale, backend=told)

    decode()
    if plan.device != "cuda":
        return decode()
    torch.cuda.synchronize()
    profiler.start()
    out = decode()
    torch.cuda.synchronize()
    profiler.stop()
    return out


def check_one(what: str, found: Sequence[Formats | Case | Shape | int]) -> None:
    """Raise `AttentionError` for several values where one call has one."""
    if len(found) > 1:
        names = ", ".join(str(each) if isinstance(each, int) else each.name for each in found)
        raise AttentionError(
            f"one call is profiled, and {what} names {len(found)}: {names}; give one"
        )


def main() -> int:
    """Decode once; 2 = refused."""
    usual = DEFAULTS["cuda"]
    parser = argparse.ArgumentParser(
        "python -m kvq_attention.bench.profiled",
        description="Decode once between a profiler's start and stop.",
    )
    add = parser.add_argument
    add("format", metavar="CODEC|k=CODEC,v=CODEC", help="of the cache")
    add(
        "--attention-backend", "--backend", dest="backend", metavar="NAME", default=support.AUTO,
        help="what decodes (default: auto)",
    )  # fmt: skip
    add("--case", metavar="BATCHxCONTEXT", default="8x32k", help="default: 8x32k")
    add("--shape", metavar="HEADS/KV_HEADSxHEAD_DIM", default=usual.shape, help="the layer")
    add("--page-tokens", metavar="TOKENS", default="16", help="of a page (default: 16)")
    add("--device", choices=DEVICES, default="cuda", help="cpu: to try the command")
    given = parser.parse_args()
    try:
        check_one("FORMAT", parse_formats(given.format))
        check_one("--case", parse_cases(given.case))
        check_one("--shape", parse_shapes(given.shape))
        check_one("--page-tokens", parse_counts(given.page_tokens, "--page-tokens"))
        chosen = plan(
            device=given.device,
            backend=f"decode={given.backend}",
            shape=given.shape,
            codecs=given.format,
            cases=given.case,
            pages=given.page_tokens,
        )
        spots = [*chosen.spots]
        decode_once(chosen, chosen.cases[0], spots[-1])
    except (AttentionError, CodecError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
