"""Pages and prefixes: operations a second of the allocator, milliseconds of the prefix cache.

    python bench_pages.py --json pages-cpu.json

A page operation is one page handed out or one page given back. The allocator works in a pool
that has been used before, so that its free pages lie scattered. Figures are the best of several
runs, by processor time of one thread: it does not count what other programs on the host took.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvq_codecs
import kvq_pools
from kvq_pools import CacheSpace, PageAllocator, PoolPlan, hybrid_swa, mha

MIN_OPERATIONS = 1.0  # millions a second, in a pool of BAR_PAGES
BAR_PAGES = 1 << 21
AT_ONCE = 1 << 10  # pages, whatever the pool's size
MAX_LOOKUP_MS = 20.0  # of BAR_TOKENS tokens
BAR_TOKENS = 1 << 17


def best_seconds(work: Callable[[], Any], repeat: int, before: Callable[[], Any] = int) -> float:
    """Shortest of `repeat` runs, of which `before` is not counted."""
    seconds = []
    for _ in range(repeat):
        before()
        gc.collect()
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return min(seconds)


def used_allocator(num_pages: int) -> PageAllocator:
    """Three quarters owned; the free pages in random order."""
    allocator = PageAllocator(num_pages)
    pages = allocator.alloc(num_pages)
    random.Random(0).shuffle(pages)
    allocator.release(pages[: num_pages // 4])
    return allocator


def allocation(
    num_pages: int, batch: int, operations: int, repeat: int, at_once: int | None = None
) -> dict[str, Any]:
    """Hand out pages and give them back, `batch` a call.

    `at_once`: as many; None = a quarter of the pool, so that a larger pool takes more memory to
    work in and more of it misses the processor's caches.
    """
    allocator = used_allocator(num_pages)
    calls = max(1, min(operations // 2, at_once or num_pages // 4) // batch)
    rounds = max(1, operations // 2 // (calls * batch))

    def work() -> None:
        alloc, release = allocator.alloc, allocator.release
        for _ in range(rounds):
            held = [alloc(batch) for _ in range(calls)]
            for pages in held:
                release(pages)

    rate = 2 * rounds * calls * batch / 1e6 / best_seconds(work, repeat)
    allocator.check_integrity()
    kind = f"{at_once:,} at once" if at_once else f"{batch} a call"
    bars = {"million_operations": MIN_OPERATIONS} if num_pages == BAR_PAGES else {}
    return {
        "work": f"{kind}, {num_pages:,} pages",
        "million_operations": round(rate, 2),
        "bars": bars,
        "meets_bars": not bars or rate >= MIN_OPERATIONS,
    }


def plan_of(kind: str, page_tokens: int) -> PoolPlan:
    """Geometry does not matter here, the tiers do."""
    spec = kvq_codecs.get("q8_0").spec
    shared: Any = {"kv_heads": 1, "head_dim": 32, "k": spec, "v": spec, "page_tokens": page_tokens}
    if kind == "full":
        return mha(layers=(0,), **shared)
    return hybrid_swa(
        full_layers=(0,), window_layers=(1,), window=1024, window_pages=1 << 14, **shared
    )


def prefixes(kind: str, page_tokens: int, num_tokens: int, repeat: int) -> list[dict[str, Any]]:
    """One long prompt: registered, looked up, opened and closed, evicted by another."""
    pages = 2 * num_tokens // page_tokens
    plan = plan_of(kind, page_tokens)
    draw = random.Random(1)
    tokens = [draw.randrange(150_000) for _ in range(num_tokens)]
    spaces: list[CacheSpace] = []

    def fresh() -> None:
        spaces[:] = [CacheSpace(plan, pages, prefix_cache=True, copy_page=lambda *_: None)]

    def compute(told: list[int] | None = tokens) -> None:
        sequence = spaces[0].open()
        for computed in range(0, num_tokens, 8192):
            sequence.grow(min(num_tokens, computed + 8192))
            sequence.advance(sequence.num_tokens, told)
        sequence.close()

    def warm() -> None:
        fresh()
        compute()

    def evict() -> None:
        sequence = spaces[0].open()
        sequence.grow(2 * num_tokens if kind == "full" else num_tokens)
        sequence.close()

    plain = best_seconds(lambda: compute(None), repeat, fresh)
    register = best_seconds(compute, repeat, fresh) - plain
    hit = spaces[0].lookup(tokens).num_tokens
    assert hit == num_tokens - 1, hit
    lookup = best_seconds(lambda: spaces[0].lookup(tokens), repeat)
    reopen = best_seconds(lambda: spaces[0].open(tokens).close(), repeat)
    evicted = best_seconds(evict, repeat, warm)
    spaces[0].check_integrity()
    figures = {
        "register": register,
        "look up": lookup,
        "open a hit, close": reopen,
        "evict": evicted,
    }
    barred = "look up" if num_tokens == BAR_TOKENS else ""
    return [
        {
            "work": f"{work}, {kind}",
            "milliseconds": round(seconds * 1e3, 2),
            "bars": {"milliseconds": MAX_LOOKUP_MS} if work == barred else {},
            "meets_bars": work != barred or seconds * 1e3 <= MAX_LOOKUP_MS,
        }
        for work, seconds in figures.items()
    ]


def cpu_model() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def show(row: dict[str, Any]) -> dict[str, Any]:
    """Print a figure as soon as it is known."""
    figures = "  ".join(
        f"{row[unit]:8} {unit}" for unit in ("million_operations", "milliseconds") if unit in row
    )
    verdict = "met" if row["meets_bars"] else "MISSED"
    print(f"{row['work']:42} {figures:28} {verdict if row['bars'] else '-'}", flush=True)
    return row


def main() -> None:
    """Measure, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pages", type=int, nargs="+", default=[1 << n for n in (12, 15, 18, 21)])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--operations", type=int, default=1 << 20)
    parser.add_argument("--tokens", type=int, default=BAR_TOKENS)
    parser.add_argument("--page-tokens", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=5, help="runs of which the best counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="record the run there")
    options = parser.parse_args()
    load_before, rows = os.getloadavg()[0], []
    for batch in options.batches:
        for pages in options.pages:
            rows.append(show(allocation(pages, batch, options.operations, options.repeat)))
    for pages in options.pages:
        rows.append(show(allocation(pages, 1, options.operations, options.repeat, AT_ONCE)))
    for kind in ("full", "window"):
        figures = prefixes(kind, options.page_tokens, options.tokens, options.repeat)
        rows += [show(row) for row in figures]
    if options.json:
        report = {
            "title": "Pages and prefixes on the CPU",
            "what": "millions of page operations a second (a page handed out or given back, so "
            "many a call and a quarter of the pool at once, or one a call and so many at once, in "
            "a pool that was used before), and milliseconds of the prefix cache "
            f"for one prompt of {options.tokens:,} tokens in pages of {options.page_tokens}, "
            "without and with a window tier; best of several runs, by processor time of one thread",
            "plot": {"label": "{work}", "values": ["million_operations"]},
            "command": "python packages/kvq-pools/benchmarks/bench_pages.py "
            f"--pages {' '.join(map(str, options.pages))} "
            f"--batches {' '.join(map(str, options.batches))} --operations {options.operations} "
            f"--tokens {options.tokens} --page-tokens {options.page_tokens} "
            f"--repeat {options.repeat}",
            "hardware": f"{cpu_model()}, {os.cpu_count()} cores",
            "load_average": {"before": load_before, "after": os.getloadavg()[0]},
            "versions": {
                "python": platform.python_version(),
                "kvq-pools": kvq_pools.__version__,
                "numpy": version("numpy"),
            },
            "rows": rows,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
