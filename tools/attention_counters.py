"""What ncu counted of decode, as a record of docs/benchmarks: a row a format, from its own output.

    ncu --profile-from-start off --clock-control none --set full -o q4_0 \
        python -m kvq_attention.bench.profiled q4_0 --backend cuda
    ncu --import q4_0.ncu-rep --page details > q4_0.txt
    ncu --import q4_0.ncu-rep --page source --csv > q4_0.csv
    python tools/attention_counters.py --like docs/benchmarks/attention-h200.json \
        --ncu 2025.3 q4_0=q4_0.txt,q4_0.csv … > docs/benchmarks/attention-counters-h200.json

The machine and the versions are those of the record that was made beside it; stall reasons are
there where the source page is.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvq_attention.bench.cases import Shape, parse_cases, parse_formats, parse_shape

Row = dict[str, Any]
Metrics = dict[tuple[str, str], tuple[str, str]]  # (section, name) → (unit, value)

TILE = 16  # tokens of a tensor-core product
SCHEDULERS = 4  # of a multiprocessor, each issues an instruction of a warp a cycle
MOST_STALLS = 3
GIGAHERTZ = {"Mhz": 1e-3, "Ghz": 1.0}
MICROSECONDS = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}
WHAT = (
    "hardware counters of one decode call by ncu, whose passes each run it alone with cold caches "
    "and clocks left as they are; DRAM and issue slots in per cent of what they could do in that "
    "time; instructions of a warp for each tile of 16 tokens and KV head, all of the kernel's, and "
    "how many the schedulers could issue while the memory reads the tile at its ceiling; "
    "stalls are shares of the samples of warps, those left out that were issuing"
)
KERNEL = re.compile(r"^  (\w+) \(\d+, \d+, \d+\)x\(\d+, \d+, \d+\)", re.MULTILINE)
PIPE = re.compile(r"(\w+) is the highest-utilized pipeline \(([\d.]+)%\)")


def kernels(details: str) -> dict[str, str]:
    """The part of ncu's details page that is of each kernel, by name; the first call's."""
    # text before the first, then a name and a text for each
    _, *parts = KERNEL.split(details)
    found: dict[str, str] = {}
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        found.setdefault(name, text)
    return found


def metrics(text: str) -> Metrics:
    """The tables of one kernel's sections."""
    found: Metrics = {}
    section = ""
    for line in text.splitlines():
        if line.startswith("    Section: "):
            section = line.removeprefix("    Section: ").strip()
            continue
        parts = re.split(r" {2,}", line.strip())
        # a name, maybe its unit, a value; advice has no such columns
        if line.startswith("    ") and len(parts) in (2, 3) and not parts[0].startswith("---"):
            found[section, parts[0]] = (parts[1] if len(parts) == 3 else "", parts[-1])
    return found


def number(found: Metrics, section: str, name: str) -> float:
    """A metric's value."""
    if (section, name) not in found:
        sys.exit(f"ncu's details have no {name!r} under {section!r}; profile with --set full")
    return float(found[section, name][1].replace(",", ""))


def measured(found: Metrics, name: str, units: dict[str, float]) -> float:
    """A metric of the first section in one unit."""
    section = "GPU Speed Of Light Throughput"
    return number(found, section, name) * units[found[section, name][0]]


def issued(tile_bytes: int, gigahertz: float, like: Row) -> int:
    """Instructions that can be issued while the memory reads a tile at its ceiling."""
    found = re.search(r"(\d+) multiprocessors", like["hardware"])
    if found is None:
        sys.exit(f"the record's hardware names no multiprocessors: {like['hardware']}")
    nanoseconds = tile_bytes / float(like["ceilings"]["read_gb_per_s"])
    return round(nanoseconds * gigahertz * SCHEDULERS * int(found[1]))


def row(
    codec: str, details: str, source: str | None, *, tiles: int, shape: Shape, like: Row
) -> Row:
    """What is told of one format: `tiles` of a KV head of the layer, on the machine of `like`."""
    parts = kernels(details)
    if "decode" not in parts:
        sys.exit(f"{codec}: ncu's details have no kernel of the name decode")
    found = metrics(parts["decode"])
    pipe = PIPE.search(" ".join(parts["decode"].split()))
    limits = [
        number(found, "Occupancy", f"Block Limit {what}")
        for what in ("Barriers", "SM", "Registers", "Shared Mem", "Warps")
        if ("Occupancy", f"Block Limit {what}") in found
    ]
    executed = number(found, "Instruction Statistics", "Executed Instructions")
    (formats,) = parse_formats(codec)
    tile_bytes = TILE * formats.token_bytes(shape) // shape.kv_heads
    gigahertz = measured(found, "SM Frequency", GIGAHERTZ)
    told: Row = {
        "codec": codec,
        "kernel_us": round(measured(found, "Duration", MICROSECONDS), 2),
        "dram_percent": number(found, "GPU Speed Of Light Throughput", "DRAM Throughput"),
        "issue_slots_percent": number(found, "Compute Workload Analysis", "Issue Slots Busy"),
        "busiest_pipe": f"{pipe[1]} {pipe[2]}%" if pipe else "",
        "bytes_a_tile": tile_bytes,
        "instructions_a_tile": round(executed / tiles),
        "while_memory_reads": issued(tile_bytes, gigahertz, like),
        "registers": int(number(found, "Launch Statistics", "Registers Per Thread")),
        "blocks_an_sm": int(min(limits)),
        "top_stalls": "" if source is None else stalls(source),
    }
    if "merge" in parts:
        told["merge_us"] = round(measured(metrics(parts["merge"]), "Duration", MICROSECONDS), 2)
    return told


def stalls(source: str) -> str:
    """The reasons that most warps wait for, of the kernel decode in ncu's source page as CSV."""
    samples: Counter[str] = Counter()
    kernel, columns = "", []
    for fields in csv.reader(source.splitlines()):
        if fields[:1] == ["Kernel Name"]:
            kernel = fields[1]
        elif fields[:1] == ["Address"]:
            columns = fields
        elif kernel == "decode":
            for column, value in zip(columns, fields, strict=False):
                if column.startswith("stall_") and "(" not in column:
                    samples[column.removeprefix("stall_")] += int(value or 0)
    del samples["selected"]  # it was issuing
    total = samples.total() or 1
    most = [(name, count) for name, count in samples.most_common(MOST_STALLS) if count]
    return ", ".join(f"{name} {count / total:.0%}" for name, count in most)


def record(rows: Iterable[Row], like: Row, *, case: str, shape: str, ncu: str) -> Row:
    """The rows as a record of docs/benchmarks."""
    machine = like["hardware"].partition(",")[0]
    return {
        "kind": "attention-counters",
        "title": f"Counters of CUDA decode on {machine}, {case}, {shape}",
        "what": WHAT,
        "plot": {
            "label": "{codec}",
            "values": ["dram_percent", "issue_slots_percent"],
            "title": "of what could be done, %",
        },
        "hardware": like["hardware"],
        "versions": {**like["versions"], "ncu": ncu},
        "command": "ncu --profile-from-start off --clock-control none --set full python -m "
        f"kvq_attention.bench.profiled FORMAT --backend cuda --case {case} --shape {shape}",
        "date": datetime.now(UTC).date().isoformat(),
        "case": case,
        "shape": shape,
        "rows": [*rows],
    }


def main() -> None:
    """Read ncu's pages and print the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("pages", nargs="+", metavar="FORMAT=DETAILS[,SOURCE.csv]", help="what ncu printed")
    add("--like", type=Path, required=True, help="a record of the same machine and versions")
    add("--ncu", required=True, help="its version")
    add("--case", default="8x32k")
    add("--shape", default="32/8x128")
    given = parser.parse_args()
    (case,), layer = parse_cases(given.case), parse_shape(given.shape)
    tiles = case.batch * -(-case.context // TILE) * layer.kv_heads
    like = json.loads(given.like.read_text(encoding="utf-8"))
    rows = []
    for page in given.pages:
        codec, _, files = page.rpartition("=")
        if not codec:
            parser.error(f"{page!r} must be FORMAT=DETAILS or FORMAT=DETAILS,SOURCE.csv")
        details, *source = [Path(name).read_text(encoding="utf-8") for name in files.split(",")]
        seen = source[0] if source else None
        rows.append(row(codec, details, seen, tiles=tiles, shape=layer, like=like))
    made = record(rows, like, case=case.name, shape=layer.name, ncu=given.ncu)
    print(json.dumps(made, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
