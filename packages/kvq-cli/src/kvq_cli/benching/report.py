"""A record of the engine's steps as tables, and what in it was left out."""

from __future__ import annotations

from typing import Any

from kvq_attention.bench import Table
from kvq_attention.bench.extend import CHOSEN

Record = dict[str, Any]


def tables(record: Record) -> list[Table]:
    """A table for each case: a line for each format, and for each route where they are compared."""
    found: dict[str, list[tuple[str, ...]]] = {}
    routes = any("route" in row for row in record["rows"])
    for row in record["rows"]:
        line = (
            *(row["cache"], row["backend"]),
            *([_route(row)] if routes else []),
            "yes" if row["graphs"] else "no",
            *(f"{row[name]:,.2f}" for name in ("step_ms", "alone_ms", "times_alone")),
            *(
                "" if row[name] is None else f"{row[name]:,.1f}"
                for name in ("tokens_per_s", "transformers_tokens_per_s")
            ),
        )
        found.setdefault(row["case"], []).append(line)
    columns = (
        "cache",
        "attention",
        *(["route"] if routes else []),
        "graphs",
        "step, ms",
        "alone, ms",
        "× alone",
        "tokens/s",
        "transformers, tokens/s",
    )
    return [Table(f"steps {case}", columns, tuple(lines)) for case, lines in found.items()]


def _route(row: dict[str, Any]) -> str:
    """Its name; of the chosen one also what it came to, which the others' names say."""
    name: str = row["route"]
    return f"{name}: {row['took']}" if name == CHOSEN and row["took"] else name


def notes(record: Record) -> list[str]:
    """What is no row, a line for each case and route: the route refused it."""
    return [
        f"left out: {each['case']}, {each['cache']}, {each['route']}: {each['reason']}"
        for each in record.get("left_out", ())
    ]
