"""A record as tables, and what in it is not as it should be."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kvq_attention.bench.checks import MAX_ERROR

Record = dict[str, Any]
Row = dict[str, Any]
Forms = dict[str, Callable[[Row], str]]  # column → its cell of a row


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
    """Ceilings, decode case by case, peers, store, copies; those that have no rows are left out."""
    made = [_ceilings(record)]
    for case in _distinct(record["decode"], "case"):
        rows = [row for row in record["decode"] if row["case"] == case]
        title = f"decode {case}, {record['shape']}"
        made.append(_by_codec(title, rows, "page_tokens", "page {}", _DECODE))
    if record["peers"]:
        cells = tuple(
            (row["case"], row["peer"], *(form(row) for form in _DECODE.values()))
            for row in record["peers"]
        )
        made.append(Table("peers over the same rows", ("case", "peer", *_DECODE), cells))
    if record["store"]:
        made.append(_by_codec("store", record["store"], "tokens", "{} tokens", _MOVED))
    if record["copy"]:
        made.append(_by_codec("copy_pages", record["copy"], "pages", "{} pages", _MOVED))
    return made


def problems(record: Record) -> list[str]:
    """What came out wrong or could not be measured."""
    found = [
        f"{row['case']}, page {row['page_tokens']}, {row['codec']}: the error "
        f"{_error(row['error'])} is above {MAX_ERROR:g}"
        for row in record["decode"]
        if row["error"] is None or row["error"] > MAX_ERROR
    ]
    for table, what in (("store", "stored"), ("copy", "copied")):
        found += [
            f"{row['codec']}: bytes {what} are not those expected"
            for row in record[table]
            if not row["exact"]
        ]
    return found + [f"{each['what']} failed: {each['why']}" for each in record["failed"]]


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
    "GB/s": lambda row: _number(row["gb_per_s"]),
    "of ceiling": lambda row: _share(row["share_of_read"]),
    "× bf16": lambda row: _times(row.get("speed_up")),
    "error": lambda row: _error(row["error"]),
}
_MOVED: Forms = {
    "µs": lambda row: _number(row["us"]),
    "GB/s": lambda row: _number(row["gb_per_s"]),
    "of copy": lambda row: _share(row["share_of_copy"]),
}


def _by_codec(title: str, rows: list[Row], key: str, label: str, forms: Forms) -> Table:
    """A line a codec; the columns of `forms` for each value of `key`."""
    values = _distinct(rows, key)
    columns = ["codec", *(f"{label.format(value)}: {name}" for value in values for name in forms)]
    lines = []
    for codec in _distinct(rows, "codec"):
        line = [codec]
        for value in values:
            found = [row for row in rows if row["codec"] == codec and row[key] == value]
            line += [form(found[0]) if found else "" for form in forms.values()]
        lines.append(tuple(line))
    backends = " and ".join(_distinct(rows, "backend"))
    return Table(f"{title}, {backends}", tuple(columns), tuple(lines))


def _distinct(rows: Iterable[Row], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


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
