"""Records of `kvq bench attention` as a page: where, how, every table, and the bars of an H200.

python tools/attention_page.py RECORD.json prints the page of one record.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kvq_codecs
from kvq_attention.bench import Table, problems, tables
from kvq_attention.bench.cases import parse_cases, parse_formats, parse_shape
from kvq_attention.bench.extend import CHOSEN
from kvq_attention.bench.report import with_shapes

Record = dict[str, Any]
Row = dict[str, Any]

HEAD = """# Attention speed

Decode, extend, store and page copies of every format, beside bf16 and beside what the memory gives
in the same run. [How to measure yours](../how-to/measure-speed.md) says what the columns mean.
"""
NOTHING = "\nNothing is recorded yet.\n"
BARRED = ("NVIDIA H200", "32/8x128")  # the machine and the layer that the bars were set for
ISO = ("iso3", "iso4")


def markdown(records: dict[str, Record]) -> str:
    """The page of all records by name."""
    return HEAD + ("".join(section(n, r) for n, r in records.items()) if records else NOTHING)


def section(name: str, record: Record) -> str:
    """One record: where and how it was measured, its plot and its tables."""
    versions = ", ".join(f"{package} {version}" for package, version in record["versions"].items())
    facts = [
        f"\n## {record['title']}\n",
        f"- What: {record['what']}.",
        f"- Machine: {record['hardware']}.",
        f"- Command: `{record['command']}`; {record['seconds']:.0f} seconds on {record['date']}.",
        f"- Versions: {versions}.",
        f"- Record: [{name}.json]({name}.json).",
        *(f"- Not as it should be: {problem}." for problem in problems(record)),
        *(f"- Not served: {what}." for what in record.get("not_served", ())),
        *(f"- Not measured: {left_out}." for left_out in record["left_out"]),
        f"\n![{record['title']}]({name}.svg)",
    ]
    shown = tables(record)
    machine, layer = BARRED
    if record["hardware"].startswith(f"{machine},") and layer in _shapes(record):
        measured = {row["backend"] for row in record["decode"]}
        measured |= {EXTEND} if record.get(EXTEND) else set()
        shown[1:1] = [bars(record, backend) for backend in BARS if backend in measured]
    return "\n".join(facts) + "\n" + "".join(f"\n{table(each)}" for each in shown)


def table(shown: Table) -> str:
    """A table with its title as a heading."""
    lines = [
        f"### {shown.title[0].upper()}{shown.title[1:]}\n",
        "| " + " | ".join(shown.columns) + " |",
        "| --- |" + " ---: |" * (len(shown.columns) - 1),
        *("| " + " | ".join(row) + " |" for row in shown.rows),
    ]
    return "\n".join(lines) + "\n"


def bars(record: Record, backend: str) -> Table:
    """What a backend was to reach, the figure that is nearest to missing it, and where that is."""
    lines = []
    for name, least, figure, rows in BARS[backend](record):
        measured = [row for row in rows if row[figure] is not None]
        if not measured:
            lines.append((name, "-", "-", "not measured"))
            continue
        worst = min(measured, key=lambda row: row[figure])
        at = [str(worst[key]) for key in ("codec", "case", "tokens") if key in worst]
        if "case" in worst:
            at.append(f"page {worst['page_tokens']}")
        at += [worst["shape"]] if worst["shape"] != BARRED[1] else []
        met = worst[figure] >= least
        lines.append((name, f"{worst[figure]:g}", ", ".join(at), "met" if met else "missed"))
    return Table(f"bars of {backend}", ("bar", "lowest", "at", "verdict"), tuple(lines))


Bar = tuple[str, float, str, list[Row]]  # name, least value, column, rows that must reach it
SHARE, FASTER = "share_of_read", "speed_up"


def _rows_of(record: Record, table: str, backend: str) -> list[Row]:
    return [row for row in with_shapes(record, table) if row["backend"] == backend]


def _at_layer(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["shape"] == BARRED[1]]


def _triton_bars(record: Record) -> Iterator[Bar]:
    decode = _at_layer(_rows_of(record, "decode", "triton"))

    def rows(keep: Callable[[Row], bool]) -> list[Row]:
        return [row for row in decode if keep(row)]

    def bf16_at(*cases: str) -> list[Row]:
        return rows(lambda row: row["codec"] == "bf16" and row["case"] in cases)

    packed = [row for row in decode if _is_packed(row) and _tokens(row) >= 4096]
    yield "bf16 ≥ 92% of the read ceiling", 0.92, SHARE, bf16_at("8x32k", "32x8k")
    yield "bf16 ≥ 85% of the read ceiling", 0.85, SHARE, bf16_at("1x128k", "128x1k")
    yield (
        "packed formats faster than bf16, but for iso",
        *(1.001, FASTER, [row for row in packed if row["codec"] not in ISO]),
    )
    yield "iso not slower than bf16", 1.0, FASTER, [r for r in packed if r["codec"] in ISO]
    for names, least in ((("fp8", "fp8_e4m3", "q8_0"), 1.5), (("q4_0",), 1.8)):
        said = f"{', '.join(names)} ≥ {least} × bf16"
        yield said, least, FASTER, [row for row in packed if row["codec"] in names]
    stores = _at_layer(_rows_of(record, "store", "triton"))
    stored = [row for row in stores if row["tokens"] == 16384]
    yield (
        "store ≥ 2,000 GB/s, but for iso",
        *(2000.0, "gb_per_s", [row for row in stored if row["codec"] not in ISO]),
    )
    yield "store of iso ≥ 500 GB/s", 500.0, "gb_per_s", [r for r in stored if r["codec"] in ISO]


# Formats, shares of the read ceiling at many pages of many requests and of one or short ones, and
# times as fast as the fastest bf16 at 8x32k.
CUDA_BARS = (
    (("fp8",), 0.90, 0.80, 1.8),
    (("q8_0", "fp8_e4m3"), 0.90, 0.80, 1.75),
    (("q6_0",), 0.80, 0.70, 2.0),
    (("nvfp4", "q4_0", "iso4"), 0.80, 0.70, 2.8),
    (("iso3",), 0.65, 0.55, 3.3),
)


def _cuda_bars(record: Record) -> Iterator[Bar]:
    everywhere = _rows_of(record, "decode", "cuda")
    decode = _at_layer(everywhere)

    def rows(names: tuple[str, ...], *cases: str) -> list[Row]:
        return [row for row in decode if row["codec"] in names and row["case"] in cases]

    for names, wide, long, faster in CUDA_BARS:
        said = ", ".join(names)
        for share, cases in ((wide, ("8x32k", "32x8k")), (long, ("1x128k", "128x1k"))):
            name = f"{said} ≥ {share:.0%} of the read ceiling at {' and '.join(cases)}"
            yield name, share, SHARE, rows(names, *cases)
        yield f"{said} ≥ {faster} × bf16 at 8x32k", faster, FASTER, rows(names, "8x32k")
    slower = {_where(row): row["us"] for row in decode if row["codec"] == "iso4"}
    beside = [
        row | {"times": round(slower[_where(row)] / row["us"], 3)}
        for row in rows(("iso3",), "8x32k", "32x8k", "1x128k", "128x1k")
        if _where(row) in slower
    ]
    yield "iso3 faster than iso4", 1.001, "times", beside
    packed = [row for row in everywhere if _is_packed(row) and _tokens(row) >= 2048]
    yield "packed formats not slower than bf16, at every layer", 1.0, FASTER, packed


def _extend_bars(record: Record) -> Iterator[Bar]:
    by_route = {(row["codec"], row["route"]): row for row in record[EXTEND] if row["case"] == MIXED}
    chosen = [row for (_, route), row in by_route.items() if route == CHOSEN]
    bf16 = by_route["bf16", CHOSEN]
    beside = [row | {"times": round(bf16["us"] / row["us"], 3)} for row in chosen]
    yield f"every format in 1.1 × bf16's time or less, {MIXED}", round(1 / 1.1, 3), "times", beside
    library = [bf16 | {"times": round(FA3_US / bf16["us"], 3)}]
    said = f"bf16 in 1.15 × FlashInfer's FlashAttention 3 ({FA3_US} µs) or less, {MIXED}"
    yield said, round(1 / 1.15, 3), "times", library


EXTEND = "extend"
MIXED = "2k+8k"
FA3_US = 554  # measured on an H200 at another time: FlashInfer is not installed where ours was
BARS: dict[str, Callable[[Record], Iterator[Bar]]] = {
    "triton": _triton_bars,
    "cuda": _cuda_bars,
    EXTEND: _extend_bars,
}


def _where(row: Row) -> tuple[Any, ...]:
    return row["case"], row["shape"], row["page_tokens"]


def _tokens(row: Row) -> int:
    return parse_cases(row["case"])[0].tokens


def _shapes(record: Record) -> list[str]:
    return record["shapes"] if "shapes" in record else [record["shape"]]


def _is_packed(row: Row) -> bool:
    layer = parse_shape(row["shape"])
    bf16 = 2 * layer.kv_heads * kvq_codecs.get("bf16").spec.row_bytes(layer.dim)
    return parse_formats(row["codec"])[0].token_bytes(layer) < bf16


if __name__ == "__main__":
    path = Path(sys.argv[1])
    print(section(path.stem, json.loads(path.read_text(encoding="utf-8"))))
