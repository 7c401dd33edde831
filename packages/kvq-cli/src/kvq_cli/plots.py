"""Benchmark records as bar charts in SVG: the same record gives the same file, byte for byte.

A record says what to draw: `"plot": {"label": "{library} {codec}", "values": ["encode"]}`; the
label is filled from each row, each value is one bar of the row. `"of"` names another list of the
record than `rows`, `"where": {KEY: VALUE}` keeps the rows that say so. With `"series": KEY`,
`values` is one column: rows of the same label are drawn as one group, a bar for each value of KEY.
"""

from __future__ import annotations

from typing import Any
from xml.sax.saxutils import escape

WIDTH, LABEL_WIDTH, FIGURE_WIDTH = 760, 190, 60
BAR, GAP, TOP = 13, 9, 44
COLOURS = ("#3f51b5", "#ff9800", "#4caf50", "#9c27b0")


def bar_chart(record: dict[str, Any]) -> str:
    """One group of bars per row that has figures, one colour per value."""
    plot = record["plot"]
    values, groups = _figures(record)
    largest = max((row.get(v) or 0 for _, row in groups for v in values), default=0) or 1
    scale = (WIDTH - LABEL_WIDTH - FIGURE_WIDTH) / largest
    group = len(values) * BAR + GAP
    height = TOP + len(groups) * group
    title = escape(", ".join(filter(None, (record["title"], plot.get("title")))))
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="4" y="16" font-size="13" font-weight="bold">{title}</text>',
    ]
    for i, name in enumerate(values):
        x = LABEL_WIDTH + min(170, (WIDTH - LABEL_WIDTH) // len(values)) * i
        out.append(f'<rect x="{x}" y="24" width="10" height="10" fill="{COLOURS[i]}"/>')
        out.append(f'<text x="{x + 14}" y="33">{escape(name.replace("_", " "))}</text>')
    for n, (label, row) in enumerate(groups):
        y = TOP + n * group
        middle = y + len(values) * BAR / 2 + 4
        out.append(
            f'<text x="{LABEL_WIDTH - 6}" y="{middle:g}" text-anchor="end">{escape(label)}</text>'
        )
        for i, name in enumerate(values):
            if row.get(name) is None:
                continue
            top, length = y + i * BAR, row[name] * scale
            out.append(
                f'<rect x="{LABEL_WIDTH}" y="{top}" width="{length:.1f}" height="{BAR - 2}" '
                f'fill="{COLOURS[i]}"/>'
            )
            out.append(
                f'<text x="{LABEL_WIDTH + length + 4:.1f}" y="{top + 10}">{row[name]:g}</text>'
            )
    return "\n".join([*out, "</svg>"]) + "\n"


def has_figures(record: dict[str, Any]) -> bool:
    """Whether the chart of a record has any bar."""
    return bool(_figures(record)[1])


Groups = list[tuple[str, dict[str, Any]]]


def _figures(record: dict[str, Any]) -> tuple[list[str], Groups]:
    """What the bars of a group stand for, and the groups that have one."""
    values, groups = _series(record) if "series" in record["plot"] else _columns(record)
    return values, [each for each in groups if any(each[1].get(v) is not None for v in values)]


def _columns(record: dict[str, Any]) -> tuple[list[str], Groups]:
    """A group for each row: its values by column."""
    plot = record["plot"]
    return plot["values"], [(plot["label"].format_map(row), row) for row in _rows(record)]


def _series(record: dict[str, Any]) -> tuple[list[str], Groups]:
    """A group for each label: its rows' value by series, of which as many as there are colours."""
    plot, rows = record["plot"], _rows(record)
    names = list(dict.fromkeys(str(row[plot["series"]]) for row in rows))[: len(COLOURS)]
    groups: dict[str, dict[str, Any]] = {}
    for row in rows:
        group = groups.setdefault(plot["label"].format_map(row), {})
        group[str(row[plot["series"]])] = row[plot["values"]]
    return names, list(groups.items())


def _rows(record: dict[str, Any]) -> list[dict[str, Any]]:
    plot = record["plot"]
    kept = plot.get("where", {}).items()
    return [row for row in record[plot.get("of", "rows")] if kept <= row.items()]
