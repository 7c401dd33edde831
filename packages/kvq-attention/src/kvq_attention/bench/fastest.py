"""`python -m kvq_attention.bench.fastest RECORD.json …`: where a backend was the fastest.

The rule by which `auto` takes a backend in crossovers.py. A call shows formats, head_dim, page size
and query heads a KV head, not how long its requests are: those four are judged over every case that
was measured. The backend is taken where it

- is faster than every other in the geometric mean over the cases,
- takes at no case more than MOST_TIMES of the time of the fastest other, and
- is, where it packs rows, at no case slower than the fastest bf16 of the run, unless the others
  are, too: who packs a cache must not wait longer for it.

Numbers of query heads between two measured neighbours that are both taken are taken as well, and so
are page sizes, with the numbers of query heads that both of their neighbours are taken with. No
kernel has a kind of its own there: what differs is how many tokens lie together in memory and how
many of them share a page id, of which a size has more than its lower neighbour and less than its
upper one. (CUDA's kernel for pages of one tile, 16 tokens, is the end of the sizes, not between.)
Beyond the measured sizes and numbers nothing is taken.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import exp, fsum, log
from pathlib import Path
from typing import Any

from kvq_attention.bench.cases import Formats, parse_formats, parse_shape
from kvq_attention.bench.checks import MAX_DECODE_ERROR
from kvq_attention.bench.report import with_shapes
from kvq_attention.claims import CUDA_PAGE_TOKENS, TRITON_PAGE_TOKENS
from kvq_attention.crossovers import Region

Record = Mapping[str, Any]
Row = dict[str, Any]

MOST_TIMES = 1.1
BF16 = Formats("bf16", "bf16")
PAGE_SIZES = sorted({*CUDA_PAGE_TOKENS, *TRITON_PAGE_TOKENS})


@dataclass(frozen=True, slots=True, order=True)
class Kind:
    """What a call shows: codecs of K and V, head_dim, tokens a page, query heads a KV head."""

    k: str
    v: str
    dim: int
    page_tokens: int
    group: int

    def __str__(self) -> str:
        formats = self.k if self.k == self.v else f"k={self.k},v={self.v}"
        return f"{formats}, head_dim {self.dim}, page {self.page_tokens}, group {self.group}"


@dataclass(frozen=True, slots=True)
class Found:
    """One case: times as fast as the fastest other backend, and as the fastest bf16.

    Attributes
    ----------
    case : its name
    error : of its result; None = not finite
    faster : time of the fastest other over this one's
    speed_up : time of the fastest bf16 over this one's; None = there is none
    others : the same of the fastest other
    packed : the cache takes less than bf16 would
    """

    case: str
    error: float | None
    faster: float
    speed_up: float | None
    others: float | None
    packed: bool

    @property
    def wrong(self) -> str | None:
        """What keeps `auto` from the backend."""
        if self.error is None or self.error > MAX_DECODE_ERROR:
            return f"wrong at {self.case}"
        if self.speed_up is None or self.others is None:
            return f"no bf16 beside it at {self.case}"
        if self.faster * MOST_TIMES < 1:
            return f"{1 / self.faster:.2f} times the time of another at {self.case}"
        if self.packed and self.speed_up < 1 <= self.others:
            return f"slower than bf16 at {self.case}, {self.speed_up:.2f}"
        return None


def judged(records: Iterable[Record], backend: str) -> dict[Kind, list[Found]]:
    """Every kind of call that the backend was measured at beside others, and its cases."""
    found: dict[Kind, list[Found]] = {}
    for record in records:
        places: dict[tuple[Any, ...], dict[str, Row]] = {}
        for row in with_shapes(dict(record), "decode"):
            at = row["case"], row["shape"], row["page_tokens"], row["codec"]
            places.setdefault(at, {})[row["backend"]] = row
        for (case, shape, page_tokens, codec), rows in places.items():
            mine = rows.pop(backend, None)
            if mine is None or not rows:
                continue
            layer, (formats,) = parse_shape(shape), parse_formats(codec)
            group = layer.heads // layer.kv_heads
            kind = Kind(formats.k, formats.v, layer.dim, page_tokens, group)
            best = min(rows.values(), key=lambda row: row["us"])
            ups = mine.get("speed_up"), best.get("speed_up")
            faster = best["us"] / mine["us"]
            packed = formats.token_bytes(layer) < BF16.token_bytes(layer)
            found.setdefault(kind, []).append(Found(case, mine["error"], faster, *ups, packed))
    return found


def mean(cases: Sequence[Found]) -> float:
    """Times as fast as the others, the geometric mean."""
    return exp(fsum(log(each.faster) for each in cases) / len(cases))


def wrongs(cases: Sequence[Found]) -> list[str]:
    """Why `auto` does not take the backend for a kind of call; nothing where it does."""
    found = [each.wrong for each in cases if each.wrong is not None]
    return found if mean(cases) > 1 else [f"{mean(cases):.2f} times as fast in the mean", *found]


def regions(records: Mapping[str, Record], backend: str) -> list[Region]:
    """Where the rule takes the backend, by what the records, path → record, show."""
    judged_ = judged(records.values(), backend)
    taken = {kind: not wrongs(cases) for kind, cases in judged_.items()}
    formats: dict[tuple[int, tuple[int, ...], range], list[tuple[str, str]]] = {}
    for k, v, dim in dict.fromkeys((kind.k, kind.v, kind.dim) for kind in taken):
        measured: dict[int, dict[int, bool]] = {}  # page size → query heads a KV head → taken
        for kind in sorted(kind for kind in taken if (kind.k, kind.v, kind.dim) == (k, v, dim)):
            measured.setdefault(kind.page_tokens, {})[kind.group] = taken[kind]
        groups = {size: [*_runs(held)] for size, held in measured.items()}
        sizes: dict[range, list[int]] = {}
        for size, runs in sorted(_with_between(groups).items()):
            for run in runs:
                sizes.setdefault(run, []).append(size)
        for run, own in sizes.items():
            formats.setdefault((dim, tuple(own), run), []).append((k, v))
    return [
        Region(backend, "decode", tuple(pairs), (dim,), sizes, groups_taken, tuple(records))
        for (dim, sizes, groups_taken), pairs in formats.items()
    ]


def _runs(held: Mapping[int, bool]) -> Iterator[range]:
    """From neighbour to neighbour among the measured values where it holds; they are in order."""
    for holds, run in groupby(held, held.__getitem__):
        if holds:
            values = [*run]
            yield range(values[0], values[-1] + 1)


def _with_between(groups: Mapping[int, list[range]]) -> dict[int, list[range]]:
    """Beside the measured page sizes those between two neighbours, with what both are taken with.

    A size that was measured at all, whether taken or not, is nothing between others.
    """
    found = dict(groups)
    for low, high in pairwise(groups):
        shared = [
            range(max(a.start, b.start), min(a.stop, b.stop))
            for a in groups[low]
            for b in groups[high]
        ]
        for size in PAGE_SIZES:
            if low < size < high:
                found[size] = [run for run in shared if run]
    return found


def read(paths: Iterable[Path]) -> dict[str, Record]:
    """The records by their paths; `ValueError` for what shows nothing of one kind of GPU."""
    records: dict[str, Record] = {}
    for path in paths:
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
        if not isinstance(record, dict) or record.get("kind") != "attention":
            raise ValueError(f"{path} is no record of `kvq bench attention`")
        if record.get("failed") or record.get("left_out"):
            raise ValueError(
                f"{path} lacks measurements, which failed or were left out: run it again"
            )
        if "capability" not in record:
            raise ValueError(f"{path} does not say the GPU's compute capability: run it again")
        records[str(path)] = record
    found = {record["capability"] for record in records.values()}
    if len(found) > 1:
        raise ValueError(f"records are of compute capabilities {found}: give those of one")
    return records


def main() -> int:
    """Print a line for each kind of call, and regions as crossovers.py holds them; 2 = refused."""
    parser = argparse.ArgumentParser(
        "python -m kvq_attention.bench.fastest",
        description="Say for which calls a backend was the fastest in every case measured.",
    )
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORD.json")
    parser.add_argument("--backend", default="cuda", help="default: cuda")
    given = parser.parse_args()
    try:
        records = read(given.records)
    except ValueError as refused:
        print(f"error: {refused}", file=sys.stderr)
        return 2
    found = judged(records.values(), given.backend)
    if not found:
        print(f"{given.backend} was not measured beside another backend")
        return 0
    for kind, cases in sorted(found.items()):
        worst = min(cases, key=lambda each: each.faster)
        said = f"{mean(cases):.2f} times as fast in the mean, {worst.faster:.2f} at {worst.case}"
        wrong = wrongs(cases)
        verdict = f"not taken: {'; '.join(wrong)}" if wrong else "taken"
        print(f"{kind}: {said} ({len(cases)} cases); {verdict}")
    print(f"compute capability {next(iter(records.values()))['capability']}:")
    print(*regions(records, given.backend), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
