"""A record as a table and in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvq_cli.evaluation.evidence import HARMFUL, HARMLESS, RUINS
from kvq_cli.evaluation.probe import BREAKS_AT

# From here on a key channel hides others in some format.
STANDS_OUT = min(BREAKS_AT.values())

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
    found = _key_notes(first["layers"])
    for scenes, key in (("needles", "found"), ("calls", "right")):
        missed = sum(not scene[key] for scene in first[scenes])
        if missed:
            found.append(
                f"the model itself misses {missed} of the {len(first[scenes])} {scenes} over "
                f"{first['format']}: what a format misses of those is not its fault"
            )
    return found


def _key_notes(layers: Sequence[Mapping[str, Any]]) -> list[str]:
    ratios = {layer["layer"]: layer["k_outlier_ratio"] for layer in layers}
    known = {number: ratio for number, ratio in ratios.items() if ratio is not None}
    found = []
    if known and max(known.values()) >= STANDS_OUT:
        number = max(known, key=lambda each: known[each])
        found.append(
            f"keys: the largest channel of layer {number} is {known[number]:.3g} times the median "
            "one (mean |k|); one scale for many channels suits such keys badly"
        )
    unknown = [str(number) for number in ratios if number not in known]
    if unknown:
        found.append(
            f"keys: in layer {', '.join(unknown)} half the channels of a head or more are 0 "
            "everywhere, so that nothing says how far others stand out"
        )
    return found


def nats(kl: float) -> str:
    """A divergence in three digits; in more where three would show a limit that it is not past."""
    for digits in range(3, 7):
        text = f"{kl:.{digits}g}"
        shown = float(text)
        if all((shown < limit) == (kl < limit) for limit in (HARMLESS, HARMFUL, RUINS)):
            break
    return text


def _predictions(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        row["format"],
        f"{row['bytes_per_token']:,.10g}",
        f"{row['perplexity']:.4f}",
        *(nats(row[key]) for key in ("kl_mean", "kl_99", "kl_999")),
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
