"""An evaluation on disk: written after each format, so that an interruption loses none."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvq_cli.config import ConfigError
from kvq_cli.quoting import in_json, quoted

KIND = "kvq eval"


class RecordError(ConfigError):
    """A record that cannot be continued or written."""


def as_json(record: Mapping[str, Any]) -> str:
    """The same record gives the same text; what holds nothing but figures is on one line."""
    indented = json.dumps(record, indent=1, ensure_ascii=False)
    # strings have no line ends of their own in JSON
    return re.sub(r"[\[{][^\[\]{}]*[\]}]", lambda flat: _one_line(flat[0]), indented) + "\n"


def _one_line(text: str) -> str:
    return re.sub(r"\n\s*", "", re.sub(r",\n\s*", ", ", text))


def finished(path: Path, about: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Format → its row, of those that a record of the same evaluation holds; none without a file.

    Parameters
    ----------
    about : what is evaluated and how; a record about anything else is refused, not overwritten
    """
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise RecordError(f"{quoted(str(path))} cannot be read: {error.strerror}") from error
    except ValueError:
        held = None
    if not isinstance(held, dict) or held.get("kind") != KIND or "rows" not in held:
        raise RecordError(
            f"{quoted(str(path))} exists and holds no evaluation; it is not overwritten: give "
            "another file to --json"
        )
    for key, wanted in about.items():
        if held.get(key) != wanted:
            raise RecordError(
                f"{quoted(str(path))} holds another evaluation: its {key} is "
                f"{in_json(held.get(key))}, not {in_json(wanted)}; give another file to --json, or "
                "delete this one"
            )
    return {row["format"]: row for row in held["rows"]}


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
