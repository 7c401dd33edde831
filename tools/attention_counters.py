"""What ncu counted of decode, as a record of docs/benchmarks: a row a format, from its own output.

    ncu --profile-from-start off --clock-control none --set full -o q4_0 \
        python -m kvq_attention.bench.profiled q4_0 --attention-backend cuda
    ncu --import q4_0.ncu-rep --page details > q4_0.txt
    ncu --import q4_0.ncu-rep --page source --csv > q4_0.csv
    python tools/attention_counters.py --like docs/benchmarks/attention-h200.json \
        --ncu 2025.3 q4_0=q4_0.txt,q4_0.csv … > docs/benchmarks/attention-counters-h200.json

The machine and the versions are those of the record that was made beside it; stall reasons are
there where the source page is. What is no such page, or not of one decode call, is refused with
exit status 2, and nothing is printed to standard output.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ncu_pages import (
    GIGAHERTZ,
    MICROSECONDS,
    Refused,
    kernels,
    measured,
    metrics,
    number,
    read,
    stalls,
)

from kvq_attention.bench.cases import Case, Shape, parse_cases, parse_formats, parse_shape
from kvq_attention.errors import AttentionError
from kvq_codecs import CodecError

Row = dict[str, Any]

TILE = 16  # tokens of a tensor-core product
SCHEDULERS = 4  # of a multiprocessor, each issues an instruction of a warp a cycle
WHAT = (
    "hardware counters of one decode call by ncu, whose passes each run it alone with cold caches "
    "and clocks left as they are; DRAM and issue slots in per cent of what they could do in that "
    "time; instructions of a warp for each tile of 16 tokens and KV head, all of the kernel's, and "
    "how many the schedulers could issue while the memory reads the tile at its ceiling; "
    "stalls are shares of the samples of warps, those left out that were issuing"
)
PIPE = re.compile(r"(\w+) is the highest-utilized pipeline \(([\d.]+)%\)")
# Limits that every ncu prints, the last of the table among them; new ones have more.
LIMITS = ("SM", "Registers", "Shared Mem", "Warps")
MORE_LIMITS = ("Barriers",)
RECORD = "give one that `kvq bench attention --json` wrote on the same GPU"


def issued(tile_bytes: int, gigahertz: float, like: Row) -> int:
    """Instructions that can be issued while the memory reads a tile at its ceiling."""
    nanoseconds = tile_bytes / float(like["ceilings"]["read_gb_per_s"])
    return round(nanoseconds * gigahertz * SCHEDULERS * multiprocessors(like))


def multiprocessors(like: Row) -> int:
    """How many the record's machine has."""
    found = re.search(r"(\d+) multiprocessors", like["hardware"])
    if found is None:
        raise Refused(f"its hardware names no multiprocessors: {like['hardware']!r}")
    return int(found[1])


def row(
    codec: str, details: str, source: str | None, *, tiles: int, shape: Shape, like: Row
) -> Row:
    """What is told of one format: `tiles` of a KV head of the layer, on the machine of `like`."""
    parts = kernels(details)
    found = metrics(parts["decode"])
    pipe = PIPE.search(" ".join(parts["decode"].split()))
    limits = [
        number(found, "Occupancy", f"Block Limit {what}")
        for what in (*LIMITS, *MORE_LIMITS)
        if what in LIMITS or ("Occupancy", f"Block Limit {what}") in found
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


def record(counted: Iterable[Row], like: Row, *, case: str, shape: str, ncu: str) -> Row:
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
        "kvq_attention.bench.profiled FORMAT --attention-backend cuda "
        f"--case {case} --shape {shape}",
        "date": datetime.now(UTC).date().isoformat(),
        "case": case,
        "shape": shape,
        "rows": [*counted],
    }


def machine(path: Path) -> Row:
    """The record that names the machine."""
    try:
        like = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Refused(f"--like {str(path)!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise Refused(f"--like {str(path)!r} is no JSON ({error}); {RECORD}") from None
    try:
        whole = (
            isinstance(like["hardware"], str)
            and isinstance(like["versions"], dict)
            and 0 < float(like["ceilings"]["read_gb_per_s"]) < float("inf")
        )
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise Refused(
            f"--like {str(path)!r} lacks hardware, versions or ceilings.read_gb_per_s; {RECORD}"
        )
    try:
        multiprocessors(like)
    except Refused as refused:
        raise Refused(f"--like {str(path)!r}: {refused}; {RECORD}") from None
    found: Row = like
    return found


def rows(pages: Iterable[str], *, case: Case, shape: Shape, like: Row) -> list[Row]:
    """A row for each FORMAT=DETAILS[,SOURCE.csv]; what is refused names its own."""
    tiles = case.batch * -(-case.context // TILE) * shape.kv_heads
    found: dict[str, Row] = {}
    for page in pages:
        codec, _, files = page.rpartition("=")
        names = files.split(",")
        if not codec or len(names) > 2:
            raise Refused(f"{page!r} must be FORMAT=DETAILS or FORMAT=DETAILS,SOURCE.csv")
        try:
            formats = parse_formats(codec)
            if len(formats) > 1 or formats[0].name in found:
                raise Refused("a format has one page; give each once, with its own files")
            details, *source = map(read, map(Path, names))
            seen = source[0] if source else None
            name = formats[0].name
            found[name] = row(name, details, seen, tiles=tiles, shape=shape, like=like)
        except (Refused, AttentionError, CodecError, csv.Error) as refused:
            raise Refused(f"{page!r}: {refused}") from None
    return [*found.values()]


def made(given: argparse.Namespace) -> Row:
    """The record that is asked for."""
    cases, layer = parse_cases(given.case), parse_shape(given.shape)
    if len(cases) > 1:
        raise Refused(f"--case {given.case!r} names {len(cases)}; give the one that was profiled")
    like = machine(given.like)
    counted = rows(given.pages, case=cases[0], shape=layer, like=like)
    return record(counted, like, case=cases[0].name, shape=layer.name, ncu=given.ncu)


def main() -> int:
    """Read ncu's pages and print the record; 2 = refused."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("pages", nargs="+", metavar="FORMAT=DETAILS[,SOURCE.csv]", help="what ncu printed")
    add("--like", type=Path, required=True, help="a record of the same machine and versions")
    add("--ncu", required=True, help="its version")
    add("--case", default="8x32k")
    add("--shape", default="32/8x128")
    try:
        text = json.dumps(made(parser.parse_args()), indent=1, ensure_ascii=False)
    except (Refused, AttentionError, CodecError) as refused:
        print(f"error: {refused}", file=sys.stderr)
        return 2
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
