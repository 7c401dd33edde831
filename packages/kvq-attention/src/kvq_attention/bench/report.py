"""A record as tables, and what in it is not as it should be."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvq_attention.bench.checks import MAX_DECODE_ERROR

Record = dict[str, Any]
Row = dict[str, Any]
Forms = dict[str, Callable[[Row], str]]  # column → its cell of a row

TABLES = ("decode", "extend", "peers", "store", "copy")


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as text: one title, as many columns as each row has cells."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        lines = [self.columns, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        aligned = (
            "  ".join(
                cell.rjust(width) if i else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        )
        return "\n".join([self.title, *(line.rstrip() for line in aligned)])


def tables(record: Record) -> list[Table]:
    """Ceilings, decode, extend, peers, store, copies: one for each size; a line for each format."""
    rows = {key: with_shapes(record, key) for key in TABLES}
    peers = _EXTEND if rows["extend"] else _DECODE
    copied = "copy_pages of {pages} pages of {page_tokens}, {shape}"
    return [
        _ceilings(record),
        *_by_codec(rows["decode"], "decode {case}, page {page_tokens}, {shape}", _DECODE),
        *_extends(rows["extend"]),
        *_grouped(rows["peers"], "peers over the rows of {case}, {shape}", "peer", peers),
        *_by_codec(rows["store"], "store of {tokens} tokens, {shape}", _MOVED),
        *_by_codec(rows["copy"], copied, _MOVED),
    ]


def with_shapes(record: Record, key: str) -> list[Row]:
    """Rows that name their shape, which records of schema 1 named once for all."""
    only = {"shape": record["shape"]} if "shape" in record else {}
    return [only | row for row in record.get(key, ())]


def problems(record: Record) -> list[str]:
    """What came out wrong or could not be measured."""
    found = [
        f"{row['case']}, page {row['page_tokens']}, {row['shape']}, {row['codec']} on "
        f"{row['backend']}: the error {_error(row['error'])} is above {MAX_DECODE_ERROR:g}"
        for row in (*with_shapes(record, "decode"), *with_shapes(record, "extend"))
        if row["error"] is None or row["error"] > MAX_DECODE_ERROR
    ]
    for table, what in (("store", "stored"), ("copy", "copied")):
        found += [
            f"{row['codec']}: bytes {what} are not those expected"
            for row in record[table]
            if not row["exact"]
        ]
    return found + [f"{each['what']} failed: {each['why']}" for each in record["failed"]]


def notes(record: Record) -> list[str]:
    """What no figure is of, a line each: not served, or left out by the budget, maybe all."""
    found = [f"not served: {what}" for what in record.get("not_served", ())]
    found += [f"not measured: {name}" for name in record["left_out"]]
    if record["left_out"] and not any(record.get(key) for key in (*TABLES, "failed")):
        found.append("nothing was measured: --budget-seconds was over before the first measurement")
    return found


def as_json(record: Record) -> str:
    """The record as a file holds it: keys in the order of the measurements."""
    return json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _ceilings(record: Record) -> Table:
    given = record["ceilings"]
    rows = (
        ("read, random pages of 1 KiB", _number(given["read_gb_per_s"])),
        ("copy, read and written", _number(given["copy_gb_per_s"])),
    )
    return Table(f"ceilings, {record['hardware']}", ("memory", "GB/s"), rows)


_DECODE: Forms = {
    "µs": lambda row: _number(row["us"]),
    "floor": lambda row: _number(row["floor_us"]),
    "GB/s": lambda row: _number(row["gb_per_s"]),
    "of ceiling": lambda row: _share(row["share_of_read"]),
    "× bf16": lambda row: _times(row.get("speed_up")),
    "error": lambda row: _error(row["error"]),
}
_EXTEND: Forms = {
    "µs": lambda row: _number(row["us"]),
    "issued in": lambda row: _number(row.get("issue_us")),
    "TFLOP/s": lambda row: _number(row["tflop_per_s"]),
    "× bf16": lambda row: _times(row.get("speed_up")),
    "error": lambda row: _error(row["error"]),
}
_MOVED: Forms = {
    "µs": lambda row: _number(row["us"]),
    "GB/s": lambda row: _number(row["gb_per_s"]),
    "of copy": lambda row: _share(row["share_of_copy"]),
}


def _extends(rows: list[Row]) -> list[Table]:
    """Tables of extend: a line for each format and way in which the past was read."""
    named = [row | {"codec": f"{row['codec']}, {row['route']}"} for row in rows]
    return _by_codec(named, "extend {case}, page {page_tokens}, {shape}", _EXTEND)


def _by_codec(rows: list[Row], title: str, forms: Forms) -> list[Table]:
    """Tables of one backend; of several that were measured beside each other lines name theirs."""
    if len({row["backend"] for row in rows}) < 2:
        return _grouped(rows, title + ", {backend}", "codec", forms)
    named = [row | {"codec": f"{row['codec']}, {row['backend']}"} for row in rows]
    return _grouped(named, title, "codec", forms)


def _grouped(rows: list[Row], title: str, key: str, forms: Forms) -> list[Table]:
    """A table for each title that rows give; a line a row: its `key` and the columns of `forms`."""
    groups: dict[str, list[tuple[str, ...]]] = {}
    for row in rows:
        line = (row[key], *(form(row) for form in forms.values()))
        groups.setdefault(title.format_map(row), []).append(line)
    return [Table(name, (key, *forms), tuple(lines)) for name, lines in groups.items()]


def _number(value: float | None) -> str:
    """Four digits."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _error(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.1e}"
