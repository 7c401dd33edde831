"""What the device's memory gives at best, measured in the run whose figures it judges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    rows = [*_reads(repeat), *_copies(repeat)]
    best = {
        name: max((row["gb_per_s"] for row in rows if row["ceiling"] == name), default=None)
        for name in ("read", "copy")
    }
    return Ceilings(**best), rows


def _reads(repeat: int) -> Iterator[Row]:
    """Every 1 KiB page of a large buffer once, in random order."""
    if find_spec("triton") is None:
        return
    from kvq_attention.bench.read_kernel import PAGE_WORDS, read_pages

    random = torch.Generator("cuda").manual_seed(0)
    nbytes = _room(READ_BYTES)
    pages = nbytes // (4 * PAGE_WORDS)
    pool = torch.empty(pages, PAGE_WORDS, dtype=torch.int32, device="cuda")
    pool.random_(generator=random)
    order = torch.randperm(pages, generator=random, device="cuda", dtype=torch.int32)
    sums = torch.empty(pages, dtype=torch.int32, device="cuda")
    for per_load, loads, warps in READ_WAYS:
        way = f"1 KiB pages, {per_load} a load, {loads} loads a program, {warps} warps"

        def read(shape: tuple[int, int, int] = (per_load, loads, warps)) -> None:
            read_pages(pool, order, sums, *shape)

        yield _row("read", way, read, nbytes, repeat, graph=True)


def _copies(repeat: int) -> Iterator[Row]:
    source = torch.randint(0, 256, (_room(COPY_BYTES),), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    # A graph would hold a copy of the driver's own, which is slower than torch's.
    yield _row(
        *("copy", "torch copy_", lambda: target.copy_(source), 2 * source.nbytes, repeat),
        graph=False,
    )


def _row(
    name: str, way: str, call: Callable[[], Any], nbytes: int, repeat: int, graph: bool
) -> Row:
    call()
    timing = time_calls([call], "cuda", repeat, graph)
    return {
        "ceiling": name,
        "way": way,
        **timed(timing),
        "bytes": nbytes,
        "gb_per_s": round(timing.gb_per_s(nbytes), 1),
    }


def _room(wanted: int) -> int:
    """So many bytes, or an eighth of what is free; a multiple of 1 MiB."""
    return min(wanted, torch.cuda.mem_get_info()[0] // 8) >> 20 << 20
