"""What the device's memory gives at best, measured in the run whose figures it judges."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from kvq_attention.bench.rows import Ceilings, Row, timed
from kvq_attention.bench.timing import time_calls

READ_BYTES = 4 << 30
COPY_BYTES = 2 << 30
# Pages a load, loads a program, warps: what is in flight at once differs. The best counts.
READ_WAYS = ((8, 4, 4), (16, 1, 4), (16, 4, 4), (16, 8, 4), (32, 4, 8), (64, 2, 8), (16, 16, 4))


def measure_ceilings(device: str, repeat: int) -> tuple[Ceilings, list[Row]]:
    """The ceilings of a GPU, and each way that was tried; nothing on a CPU."""
    if device != "cuda":
        return Ceilings(), []
    read = _best("read", _reads(), READ_BYTES, repeat, graph=True)
    # A graph would hold a copy of the driver's own, which is slower than torch's.
    copy = _best("copy", _copies(), 2 * COPY_BYTES, repeat, graph=False)
    rows = [*read, *copy]
    best = {
        name: max((row["gb_per_s"] for row in rows if row["ceiling"] == name), default=None)
        for name in ("read", "copy")
    }
    return Ceilings(**best), rows


def _best(
    name: str, ways: dict[str, Callable[[], Any]], nbytes: int, repeat: int, graph: bool
) -> list[Row]:
    rows = []
    for way, call in ways.items():
        call()
        timing = time_calls([call], "cuda", repeat, graph)
        rows.append(
            {
                "ceiling": name,
                "way": way,
                **timed(timing),
                "bytes": nbytes,
                "gb_per_s": round(timing.gb_per_s(nbytes), 1),
            }
        )
    return rows


def _reads() -> dict[str, Callable[[], Any]]:
    """Every 1 KiB page of a large buffer once, in random order."""
    if find_spec("triton") is None:
        return {}
    from kvq_attention.bench.read_kernel import PAGE_WORDS, read_pages

    random = torch.Generator("cuda").manual_seed(0)
    pages = READ_BYTES // (4 * PAGE_WORDS)
    pool = torch.empty(pages, PAGE_WORDS, dtype=torch.int32, device="cuda")
    pool.random_(generator=random)
    order = torch.randperm(pages, generator=random, device="cuda", dtype=torch.int32)
    sums = torch.empty(pages, dtype=torch.int32, device="cuda")

    def read(way: tuple[int, int, int]) -> Callable[[], Any]:
        return lambda: read_pages(pool, order, sums, *way)

    return {
        f"1 KiB pages, {pages} a load, {rounds} loads a program, {warps} warps": read(
            (pages, rounds, warps)
        )
        for pages, rounds, warps in READ_WAYS
    }


def _copies() -> dict[str, Callable[[], Any]]:
    source = torch.randint(0, 256, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return {"torch copy_": lambda: target.copy_(source)}
