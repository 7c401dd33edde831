"""An evaluation as points in SVG: mean KL against bytes a token, the same file every time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from kvq_cli.quoting import printable

WIDTH, HEIGHT = 760, 460
LEFT, RIGHT, TOP, BOTTOM = 72, 120, 64, 48
INK, FAINT, POINT, GRID = "#212121", "#757575", "#3f51b5", "#e0e0e0"
LINE = 13  # between labels


def scatter(record: Mapping[str, Any]) -> str:
    """One point for each format that differs from the reference at all."""
    rows = [row for row in record["rows"] if row["kl_mean"] > 0]
    text = record["text"]
    subtitle = (
        f"mean KL to the fp32 cache (nats, logarithmic), {text['tokens']:,} tokens of "
        f"{text['name']}, {record['context']:,} at a time"
    )
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(12, 24, f"{record['model']['name']}: what a format costs", size=16),
        _text(12, 44, subtitle, colour=FAINT),
    ]
    if rows:
        out += _plot(rows)
    return "\n".join([*out, "</svg>"]) + "\n"


def _plot(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Axes and points."""
    largest: float = max(row["bytes_per_token"] for row in rows)
    low = math.floor(math.log10(min(row["kl_mean"] for row in rows)))
    high = max(low + 1, math.ceil(math.log10(max(row["kl_mean"] for row in rows))))
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def x(nbytes: float) -> float:
        return LEFT + nbytes / largest * (right - LEFT)

    def y(kl: float) -> float:
        share: float = (math.log10(kl) - low) / (high - low)
        return bottom - share * (bottom - TOP)

    out = []
    for power in range(low, high + 1):
        level = bottom - (power - low) * (bottom - TOP) / (high - low)
        out.append(_line(LEFT, level, right, level))
        out.append(_text(LEFT - 8, level + 4, f"1e{power}", anchor="end", colour=FAINT))
    for part in range(5):
        place = x(largest * part / 4)
        out.append(_line(place, TOP, place, bottom))
        figure = f"{largest * part / 4:,.0f}"
        out.append(_text(place, bottom + 18, figure, anchor="middle", colour=FAINT))
    middle = (LEFT + right) / 2
    out.append(_text(middle, bottom + 36, "bytes a token", anchor="middle", colour=FAINT))
    taken: list[tuple[float, float]] = []
    for row in sorted(rows, key=lambda row: (row["kl_mean"], row["format"])):
        across, level = x(row["bytes_per_token"]), y(row["kl_mean"])
        label = level + 4
        while any(abs(across - a) < 90 and abs(label - b) < LINE for a, b in taken):
            label -= LINE  # labels of near points stand above each other
        taken.append((across, label))
        out.append(f'<circle cx="{across:.1f}" cy="{level:.1f}" r="4" fill="{POINT}"/>')
        out.append(_text(across + 8, label, row["format"]))
    return out


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", colour: str = INK, size: int = 12
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f'<text {place} fill="{colour}">{escape(printable(text))}</text>'


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{GRID}"/>'
