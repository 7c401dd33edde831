"""What is known of a model's formats: its evaluation, kept where a server and a plan find it.

It lies in the user's cache directory under the identity of the weights, not beside them: a model's
directory is often shared or read-only, and a copy of the model elsewhere is the same model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

import platformdirs

from kvq_cli.config import CacheFormatError, ModelGeometry, check_format, parse_formats
from kvq_cli.evaluation import record as records
from kvq_cli.models.identity import identity
from kvq_cli.quoting import printable

# Mean KL to the fp32 cache (nats) of what was measured on SmolLM2-135M and Gemma-3-270M: up to
# HARMLESS one prediction in fifteen at most is another; from HARMFUL on one in five and more, with
# q4_0 on both (nvfp4 lies just below); a format that RUINS a model (iso3 and iso4 on Gemma) writes
# another text.
HARMLESS, HARMFUL, RUINS = 0.01, 0.1, 0.5
REFERENCE = "fp32"  # what each row is compared with: no format that a server would be told of


@dataclass(frozen=True, slots=True)
class Measured:
    """A format's row of an evaluation.

    Attributes
    ----------
    kl : mean KL to the fp32 cache (nats)
    agreement : share of predictions whose most likely token is the fp32 cache's
    """

    format: str
    bytes_per_token: float
    kl: float
    agreement: float

    def __str__(self) -> str:
        return f"mean KL {self.kl:.2g}, {self.agreement:.1%} of the fp32 cache's next tokens"


@dataclass(frozen=True, slots=True)
class Evidence:
    """An evaluation of a model.

    Attributes
    ----------
    source : what it was measured on, in words
    """

    source: str
    rows: tuple[Measured, ...]

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Evidence:
        """Of a record of `kvq eval`; KeyError, TypeError or ValueError where it is none."""
        text = record["text"]
        name, tokens = text["name"], text["tokens"]
        if not isinstance(name, str) or type(tokens) is not int:
            raise TypeError("a text has a name and a number of tokens")
        name.encode()  # a lone surrogate can be read, and neither printed nor written
        rows = tuple(
            Measured(
                _name(row["format"]),
                _figure(row["bytes_per_token"]),
                _figure(row["kl_mean"]),
                _figure(row["top1_agreement"]),
            )
            for row in record["rows"]
        )
        return cls(f"{tokens:,} tokens of {printable(name)}", rows)

    def stored_by(self, shape: ModelGeometry) -> Evidence:
        """The rows whose formats a model's cache can have: another version may know others."""

        def stored(row: Measured) -> bool:
            try:
                check_format(shape, parse_formats(row.format, shape))
            except CacheFormatError:
                return False
            return True

        return replace(self, rows=tuple(filter(stored, self.rows)))

    def __getitem__(self, name: str) -> Measured | None:
        """A format's row; None = it was not measured."""
        return next((row for row in self.rows if row.format == name), None)

    @property
    def ladder(self) -> list[Measured]:
        """Formats of less than 16 bits that none is better than, the most exact first.

        Each takes fewer bytes than all before it, and none that ruins the model is among them.
        """
        sixteen_bits = max((row.bytes_per_token for row in self.rows), default=0.0) / 2  # of fp32
        found: list[Measured] = []
        for row in sorted(self.rows, key=lambda row: (row.kl, row.bytes_per_token)):
            smallest = found[-1].bytes_per_token if found else sixteen_bits
            if row.bytes_per_token < smallest and row.kl < RUINS:
                found.append(row)
        return found

    def warnings(self, name: str) -> tuple[str, ...]:
        """What a user should know who serves the model in a format."""
        row = self[name]
        if row is None or row.kl < HARMFUL:
            return ()
        safer = [other for other in self.ladder if other.kl < min(HARMFUL, row.kl / 2)]
        instead = f"; safer: {safer[-1].format} ({safer[-1]})" if safer else ""
        verb = "ruins" if row.kl >= RUINS else "harms"
        return (f"{name} {verb} this model: {row}, measured on {self.source}{instead}",)


def directory() -> Path:
    """Where evaluations are kept."""
    return Path(platformdirs.user_cache_dir("kvq", appauthor=False)) / "evaluations"


def known(model: Path, shape: ModelGeometry | None = None) -> Evidence | None:
    """What was kept of the model in a directory or GGUF file; None = nothing that can be read.

    Parameters
    ----------
    shape : of the model, whose cache has the formats that are returned; None = all are
    """
    path = _place(model)
    record = None if path is None else _read(path)
    if record is None:
        return None
    found = Evidence.of(record)
    return found if shape is None else found.stored_by(shape)


def notes(model: Path, shape: ModelGeometry) -> tuple[str, ...]:
    """What a user should know of the file where a model's evaluation is kept."""
    path, found = _place(model), known(model)
    if found is None:
        if path is None or not path.exists():
            return ()
        return (
            f"{path} holds no evaluation that can be read and is ignored; "
            "delete it, or run kvq eval again",
        )
    lacking = len(found.rows) - len(found.stored_by(shape).rows)
    if not lacking:
        return ()
    said = "a format" if lacking == 1 else f"{lacking} formats"
    return (f"{path} holds {said} that this kvq does not know; the rest is used",)


def keep(
    model: Path, record: Mapping[str, Any], tell: Callable[[str], None] = lambda _: None
) -> Path | None:
    """Keep an evaluation, with what was known; returns where, None where it is not kept.

    One of the same text and settings is added to. Another takes its place unless more was known:
    by more tokens, or by as many and a format that the new one lacks, or by any format at all
    where the new one was cut off before its first.

    Parameters
    ----------
    tell : hears where the evaluation is kept, or why not
    """
    try:
        path = _put(model, record)
    except _NotKeptError as error:
        tell(f"not kept for kvq serve and kvq plan: {error}")
        return None
    tell(f"kept in {path}: kvq serve and kvq plan go by it")
    return path


class _NotKeptError(Exception):
    """Why an evaluation is not kept."""


_NO_EVIDENCE = (ValueError, KeyError, TypeError, OverflowError, RecursionError)


def _put(model: Path, record: Mapping[str, Any]) -> Path:
    # serve and plan read what is kept on systems, too, that have no such locks
    from kvq_cli.evaluation.claim import in_turn

    path = _place(model)
    if path is None:
        raise _NotKeptError("there are no weights beside the model's config to know it by")
    try:
        Evidence.of(record)
    except _NO_EVIDENCE as error:
        raise _NotKeptError("not all of its figures are finite numbers") from error
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # of two that add to what they read, the later would drop what the other added
        with in_turn(path):
            records.write(path, _joined(path, record))
    except (OSError, records.RecordError) as error:
        # a full or read-only home is no reason to lose an evaluation
        raise _NotKeptError(f"{path} cannot be written: {_reason(error)}") from error
    return path


def _joined(path: Path, record: Mapping[str, Any]) -> Mapping[str, Any]:
    """A record with what is kept of the same evaluation; `_NotKeptError` where that has more."""
    held = _read(path)
    if held is None:
        return record
    if _about(held) != _about(record):
        if more := _more(held, record):
            raise _NotKeptError(f"{path} holds another of {more}; delete it to forget it")
        return record
    names = [row["format"] for row in record["rows"]]
    others = [row for row in held["rows"] if row["format"] not in names]
    return {**record, "rows": [*record["rows"], *others]}


def _place(model: Path) -> Path | None:
    key = identity(model)
    return None if key is None else directory() / f"{key}.json"


def _read(path: Path) -> dict[str, Any] | None:
    """The record that is kept there; None where there is none, or what is there is no record."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        Evidence.of(record)
    except (OSError, *_NO_EVIDENCE):
        return None
    return dict(record)


def _more(held: Mapping[str, Any], record: Mapping[str, Any]) -> str | None:
    """What another evaluation has and this one lacks, in words; None = nothing."""
    tokens, wanted = (each["text"]["tokens"] for each in (held, record))
    formats, mine = (
        {row["format"] for row in each["rows"]} - {REFERENCE} for each in (held, record)
    )
    if tokens > wanted:
        return f"more tokens ({tokens:,})"
    if formats and not mine:
        return "more formats"
    if tokens == wanted and formats - mine:
        return f"as many tokens and more formats ({', '.join(sorted(formats - mine))})"
    return None


def _reason(error: Exception) -> str:
    """What the system said."""
    said = error.__cause__ or error
    return said.strerror or str(said) if isinstance(said, OSError) else str(said)


def _about(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "rows"}


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("a format is named by a text")
    value.encode()
    return value


def _figure(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError("a figure is a number")
    if not isfinite(value):
        raise ValueError("a figure is finite")
    return value
