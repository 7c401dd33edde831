"""What is known of a model's formats: its evaluation, kept where a server and a plan find it.

It lies in the user's cache directory under the identity of the weights, not beside them: a model's
directory is often shared or read-only, and a copy of the model elsewhere is the same model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from kvq_cli.evaluation import record as records
from kvq_cli.models.identity import identity

# Mean KL to the fp32 cache (nats) of what was measured on SmolLM2-135M and Gemma-3-270M: up to
# HARMLESS one prediction in fifteen at most is another; from HARMFUL on one in six and more, with
# q4_0 on both; a format that RUINS a model (iso3 and iso4 on Gemma) writes another text.
HARMLESS, HARMFUL, RUINS = 0.01, 0.1, 0.5


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
        """Of a record of `kvq eval`; KeyError or TypeError where it is none."""
        text = record["text"]
        rows = tuple(
            Measured(row["format"], row["bytes_per_token"], row["kl_mean"], row["top1_agreement"])
            for row in record["rows"]
        )
        return cls(f"{text['tokens']:,} tokens of {text['name']}", rows)

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


def known(model: Path) -> Evidence | None:
    """What was kept of the model in a directory or GGUF file; None = nothing that can be read."""
    record = _kept(model)
    return None if record is None else Evidence.of(record)


def keep(model: Path, record: Mapping[str, Any]) -> Path | None:
    """Keep an evaluation, with what was known; returns where, None where it is not kept.

    One of the same text and settings is added to. Another takes its place, unless it is of fewer
    tokens: then what is known stays.
    """
    path = _place(model)
    if path is None:
        return None
    held = _kept(model)
    if held is not None:
        if _about(held) == _about(record):
            names = [row["format"] for row in record["rows"]]
            others = [row for row in held["rows"] if row["format"] not in names]
            record = {**record, "rows": [*record["rows"], *others]}
        elif held["text"]["tokens"] > record["text"]["tokens"]:
            return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        records.write(path, record)
    except (OSError, records.RecordError):
        return None  # a full or read-only home is no reason to lose an evaluation
    return path


def _place(model: Path) -> Path | None:
    key = identity(model)
    return None if key is None else directory() / f"{key}.json"


def _kept(model: Path) -> dict[str, Any] | None:
    """The record that is kept; None where there is none, or what is there is no record."""
    path = _place(model)
    try:
        record = {} if path is None else json.loads(path.read_text(encoding="utf-8"))
        Evidence.of(record)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return dict(record)


def _about(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "rows"}
