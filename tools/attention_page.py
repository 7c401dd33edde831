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

Record = dict[str, Any]
Row = dict[str, Any]

HEAD = """# Attention speed

Decode, store and page copies of every format, beside bf16 and beside what the memory gives in the
same run. [How to measure yours](../how-to/measure-speed.md) says what the columns mean.
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
        *(f"- Not measured: {left_out}." for left_out in record["left_out"]),
        f"\n![{record['title']}]({name}.svg)",
    ]
    shown = tables(record)
    if (record["hardware"].partition(",")[0], record["shape"]) == BARRED:
        shown.insert(1, bars(record))
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


def bars(record: Record) -> Table:
    """What was to be reached, the figure that is nearest to missing it, and where that is."""
    lines = []
    for name, least, figure, rows in _bars(record):
        measured = [row for row in rows if row[figure] is not None]
        if not measured:
            lines.append((name, "-", "-", "not measured"))
            continue
        worst = min(measured, key=lambda row: row[figure])
        at = [str(worst[key]) for key in ("codec", "case", "tokens") if key in worst]
        if "case" in worst:
            at.append(f"page {worst['page_tokens']}")
        met = worst[figure] >= least
        lines.append((name, f"{worst[figure]:g}", ", ".join(at), "met" if met else "missed"))
    return Table("bars", ("bar", "lowest", "at", "verdict"), tuple(lines))


def _bars(record: Record) -> Iterator[tuple[str, float, str, list[Row]]]:
    """Name, least value, column, rows that must reach it."""
    decode: list[Row] = record["decode"]

    def rows(keep: Callable[[Row], bool]) -> list[Row]:
        return [row for row in decode if keep(row)]

    def bf16_at(*cases: str) -> list[Row]:
        return rows(lambda row: row["codec"] == "bf16" and row["case"] in cases)

    long = rows(lambda row: parse_cases(row["case"])[0].tokens >= 4096)
    packed = [row for row in long if _is_packed(row["codec"], record["shape"])]
    share, faster = "share_of_read", "speed_up"
    yield "bf16 ≥ 92% of the read ceiling", 0.92, share, bf16_at("8x32k", "32x8k")
    yield "bf16 ≥ 85% of the read ceiling", 0.85, share, bf16_at("1x128k", "128x1k")
    yield (
        "packed formats faster than bf16, but for iso",
        *(1.001, faster, [row for row in packed if row["codec"] not in ISO]),
    )
    yield "iso not slower than bf16", 1.0, faster, [r for r in packed if r["codec"] in ISO]
    for names, least in ((("fp8", "fp8_e4m3", "q8_0"), 1.5), (("q4_0",), 1.8)):
        said = f"{', '.join(names)} ≥ {least} × bf16"
        yield said, least, faster, [row for row in packed if row["codec"] in names]
    stored = [row for row in record["store"] if row["tokens"] == 16384]
    yield (
        "store ≥ 2,000 GB/s, but for iso",
        *(2000.0, "gb_per_s", [row for row in stored if row["codec"] not in ISO]),
    )
    yield "store of iso ≥ 500 GB/s", 500.0, "gb_per_s", [r for r in stored if r["codec"] in ISO]


def _is_packed(codec: str, shape: str) -> bool:
    layer = parse_shape(shape)
    bf16 = 2 * layer.kv_heads * kvq_codecs.get("bf16").spec.row_bytes(layer.dim)
    return parse_formats(codec)[0].token_bytes(layer) < bf16


if __name__ == "__main__":
    path = Path(sys.argv[1])
    print(section(path.stem, json.loads(path.read_text(encoding="utf-8"))))
