"""An evaluation on disk: written after each format, so that an interruption loses none."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvq_cli.config import ConfigError
from kvq_cli.evaluation.schema import fault, shown
from kvq_cli.quoting import quoted

KIND = "kvq eval"


class RecordError(ConfigError):
    """A record that cannot be continued or written."""


def as_json(record: Mapping[str, Any]) -> str:
    """The same record gives the same text; what holds nothing but figures is on one line."""
    # NaN and Infinity are Python's own: no other reader takes them
    indented = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False)
    # strings have no line ends of their own in JSON
    return re.sub(r"[\[{][^\[\]{}]*[\]}]", lambda flat: _one_line(flat[0]), indented) + "\n"


def _one_line(text: str) -> str:
    return re.sub(r"\n\s*", "", re.sub(r",\n\s*", ", ", text))


def finished(path: Path, about: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Format → its row, of those that a record of the same evaluation holds.

    None without a file, or with an empty one.

    Parameters
    ----------
    about : what is evaluated and how, or as much of it as is known; a record about anything else
        is refused, not overwritten, and so is a damaged one
    """
    held = _read(path)
    if held is None:
        return {}
    found = _difference(held, about)
    if found is not None:
        part, had, wanted = found
        raise RecordError(
            f"{quoted(str(path))} holds another evaluation: its {part} is {shown(had)}, not "
            f"{shown(wanted)}; give another file to --json, or delete this one"
        )
    wrong = fault(held["rows"])
    if wrong is not None:
        raise RecordError(
            f"{quoted(str(path))} holds a damaged evaluation: {wrong}; give another file to "
            "--json, or delete this one"
        )
    return {row["format"]: row for row in held["rows"]}


def check_place(path: Path) -> None:
    """Refuse a directory, a device or a pipe: a record takes the place of what was there."""
    if path.exists() and not path.is_file():
        raise RecordError(f"{quoted(str(path))} is no ordinary file; give another to --json")


def _read(path: Path) -> dict[str, Any] | None:
    """What a file holds, of which `kind` and that there are rows are known."""
    check_place(path)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RecordError(f"{quoted(str(path))} cannot be read: {error.strerror}") from error
    if not content.strip():
        return None  # as programs make it that reserve a name
    try:
        held = json.loads(content.decode())
    except (ValueError, RecursionError):
        held = None
    if not isinstance(held, dict) or held.get("kind") != KIND or "rows" not in held:
        raise RecordError(
            f"{quoted(str(path))} exists and holds no evaluation; it is not overwritten: give "
            "another file to --json"
        )
    return held


def _difference(
    held: Mapping[str, Any], wanted: Mapping[str, Any], place: str = ""
) -> tuple[str, Any, Any] | None:
    """The first part of what is wanted that a record has not so: its name and both values."""
    for key, value in wanted.items():
        had = held.get(key)
        if isinstance(value, Mapping) and isinstance(had, Mapping):
            inner = _difference(had, value, f"{place}{key}.")
            if inner is not None:
                return inner
        elif had != value:
            return f"{place}{key}", had, value
    return None


def write(path: Path, record: Mapping[str, Any]) -> None:
    """Put a record in the place of the one before, whole or not at all."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(as_json(record), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise RecordError(
            f"the record cannot be written to {quoted(str(path))}: {error.strerror}"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
