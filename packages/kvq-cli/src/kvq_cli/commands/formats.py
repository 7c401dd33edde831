"""`kvq formats`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from kvq_cli.commands.messages import plain_errors


@plain_errors
def formats(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON list instead of a table.")
    ] = False,
) -> None:
    """Print every cache format: its size, and its error measured on Gaussian rows."""
    from kvq_codecs import table

    rows = table.rows()
    if as_json:
        print(json.dumps([_fields(row, table.HEAD_DIMS) for row in rows], indent=2))
    else:
        print(table.render(rows), end="")


def _fields(row: Any, head_dims: tuple[int, ...]) -> dict[str, Any]:
    """A row with the head_dim beside each size, which the table has in its head."""
    return {**asdict(row), "row_bytes": dict(zip(head_dims, row.row_bytes, strict=True))}
