"""A record as a table and in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PREDICTIONS = ("format", "bytes/token", "perplexity", "mean KL", "99% KL", "99.9% KL", "top-1")
USES = ("format", "greedy tokens", "needles", "right calls", "K error", "V error")


@dataclass(frozen=True, slots=True)
class TableText:
    """A title, columns and cells."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def tables(record: Mapping[str, Any]) -> list[TableText]:
    """One line for each format, in two tables that a terminal of 80 columns holds."""
    text, rows = record["text"], record["rows"]
    title = (
        f"{record['model']['name']} on {text['tokens']:,} tokens of {text['name']}, "
        f"{record['context']:,} at a time, {record['computed']}"
    )
    return [
        TableText(title, PREDICTIONS, [_predictions(row) for row in rows]),
        TableText("", USES, [_uses(row) for row in rows]),
    ]


def notes(record: Mapping[str, Any]) -> list[str]:
    """What stands out in the model itself and what the figures do not show."""
    if not record["rows"]:
        return []
    first = record["rows"][0]
    layer = max(first["layers"], key=lambda each: each["k_outlier_ratio"])
    found = [
        f"keys: the largest channel of layer {layer['layer']} is {layer['k_outlier_ratio']:.3g} "
        "times the median one (mean |k|); one scale for many channels suits such keys badly"
    ]
    for scenes, key in (("needles", "found"), ("calls", "right")):
        missed = sum(not scene[key] for scene in first[scenes])
        if missed:
            found.append(
                f"the model itself misses {missed} of the {len(first[scenes])} {scenes} over "
                f"{first['format']}: what a format misses of those is not its fault"
            )
    return found


def _predictions(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        row["format"],
        f"{row['bytes_per_token']:,.10g}",
        f"{row['perplexity']:.4f}",
        *(f"{row[key]:.3g}" for key in ("kl_mean", "kl_99", "kl_999")),
        f"{row['top1_agreement']:.2%}",
    )


def _uses(row: Mapping[str, Any]) -> tuple[str, ...]:
    greedy, needles = row["greedy_tokens"], row["needles"]
    return (
        row["format"],
        f"{sum(greedy) / len(greedy):.3g}",
        _count(needles, "found"),
        _count(row["calls"], "right"),
        *(f"{row[f'{side}_relative_error']:.2%}" for side in ("k", "v")),
    )


def _count(scenes: Sequence[Mapping[str, Any]], key: str) -> str:
    """Of how many it is true; none were tried where a context has no room for them."""
    return f"{sum(scene[key] for scene in scenes)}/{len(scenes)}" if scenes else "-"
