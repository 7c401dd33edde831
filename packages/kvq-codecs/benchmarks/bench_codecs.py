"""Speed and memory: every codec in NumPy on one core, q8_0 and q4_0 in torch on two.

    python bench_codecs.py --json codecs-cpu.json

Each codec runs in a process of its own, so that its peak memory is its own. Figures are the best
of several runs; the load of the host is recorded beside them. One thread is timed by the
processor time it took, several by the clock on the wall: the former does not count what other
programs on the host took.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import kvq_codecs

ISO = ("iso3", "iso4")
UNSCALED = ("fp32", "bf16", "fp16")
MAX_PEAK = 6.0  # times the rows


def bars(library: str, codec: str) -> dict[str, float]:
    """Least millions of values a second, where a bar was set."""
    if library == "torch":
        return {"decode": 400.0} if codec in ("q8_0", "q4_0") else {}
    if codec in UNSCALED:
        return {}
    return {"encode": 8.0, "decode": 20.0} if codec in ISO else {"encode": 40.0, "decode": 100.0}


def best_seconds(call: Callable[[], Any], repeat: int, threads: int) -> float:
    """Shortest of `repeat` runs."""
    clock = time.process_time if threads == 1 else time.perf_counter
    seconds = []
    for _ in range(repeat):
        start = clock()
        call()
        seconds.append(clock() - start)
    return min(seconds)


def peak_bytes() -> int:
    """Largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run(library: str, name: str, num_rows: int, dim: int, threads: int, repeat: int) -> Any:
    """One codec's figures."""
    some = np.random.default_rng(0).standard_normal((1 << 12, dim), np.float32)
    rows: Any = np.resize(some, (num_rows, dim))
    if library == "torch":
        import torch

        torch.set_num_threads(threads)
        rows = torch.from_numpy(rows)
    codec = kvq_codecs.get(name)
    codec.decode(codec.encode(rows[:2]))
    before = peak_bytes()
    encoded = codec.encode(rows)
    codec.decode(encoded)
    peak = (peak_bytes() - before) / (num_rows * dim * 4)

    def rate(call: Callable[[], Any]) -> float:
        return round(num_rows * dim / 1e6 / best_seconds(call, repeat, threads), 1)

    figures: dict[str, Any] = {
        "library": library,
        "threads": threads,
        "codec": name,
        "encode": rate(lambda: codec.encode(rows)),
        "decode": rate(lambda: codec.decode(encoded)),
        "peak_over_rows": round(peak, 2),
        "bars": bars(library, name),
    }
    figures["meets_bars"] = peak <= MAX_PEAK and all(
        figures[what] >= bar for what, bar in figures["bars"].items()
    )
    return figures


def cpu_model() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> None:
    """Measure, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1 << 20)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3, help="runs of which the best counts")
    parser.add_argument("--torch-threads", type=int, default=2)
    parser.add_argument("--libraries", nargs="+", choices=("numpy", "torch"))
    parser.add_argument("--codecs", nargs="+", choices=kvq_codecs.names())
    parser.add_argument("--json", type=Path, metavar="FILE", help="record the run there")
    options = parser.parse_args()
    libraries = options.libraries or ["numpy", "torch"]
    threads = {"numpy": 1, "torch": options.torch_threads}
    load_before, results = os.getloadavg()[0], []
    print("library  threads  codec     encode    decode  M values/s   peak / rows   bars")
    for library in libraries:
        os.environ["OMP_NUM_THREADS"] = str(threads[library])
        with_bars = [n for n in kvq_codecs.names() if library == "numpy" or bars(library, n)]
        for name in options.codecs or with_bars:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                task = (library, name, options.rows, options.dim, threads[library], options.repeat)
                figures = pool.apply(run, task)
            results.append(figures)
            verdict = "met" if figures["meets_bars"] else "MISSED"
            print(
                f"{library:8} {threads[library]:7}  {name:8} {figures['encode']:8}  "
                f"{figures['decode']:8} {figures['peak_over_rows']:25}   "
                f"{verdict if figures['bars'] else '-'}",
                flush=True,
            )
    if options.json:
        report = {
            "title": "Codecs on the CPU",
            "what": "millions of values a second, best of several runs, by processor time where "
            "threads is 1, else by the wall clock; peak_over_rows is the "
            "largest growth of resident memory over an encode and a decode, outputs included, "
            "in units of the float32 rows",
            "plot": {"label": "{library} {codec}", "values": ["encode", "decode"]},
            "command": "python packages/kvq-codecs/benchmarks/bench_codecs.py "
            f"--rows {options.rows} --dim {options.dim} --repeat {options.repeat} "
            f"--torch-threads {options.torch_threads} --libraries {' '.join(libraries)}",
            "hardware": f"{cpu_model()}, {os.cpu_count()} cores",
            "load_average": {"before": load_before, "after": os.getloadavg()[0]},
            "versions": {
                "python": platform.python_version(),
                "kvq-codecs": kvq_codecs.__version__,
                **{p: version(p) for p in ("numpy", "array-api-compat")},
                **({"torch": version("torch")} if "torch" in libraries else {}),
            },
            "rows": results,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
