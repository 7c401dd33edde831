"""A plan as a bar chart in SVG: the same plan gives the same file, byte for byte."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from kvq_cli.capacity import BASELINE, Capacity

BARS_WIDTH, FIGURE_WIDTH, LETTER = 500, 190, 6.8
BAR, STEP, TOP, BOTTOM = 16, 24, 110, 34
INK, FAINT, PLAIN, REFERENCE, GRID = "#212121", "#757575", "#3f51b5", "#ff9800", "#e0e0e0"


def bar_chart(title: str, subtitles: Sequence[str], rows: Sequence[Capacity]) -> str:
    """One bar of tokens that fit for each format, and a line at what bf16 holds.

    `subtitles`: at most two lines.
    """
    largest = max(row.tokens for row in rows) or 1
    scale = BARS_WIDTH / largest
    left = 24 + round(LETTER * max(len(str(row.formats)) for row in rows))
    wide = 24 + round(LETTER * max(map(len, subtitles)))
    width, bottom = max(left + BARS_WIDTH + FIGURE_WIDTH, wide), TOP + len(rows) * STEP
    reference = next((row.tokens for row in rows if row.formats == BASELINE), None)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom + BOTTOM}" '
        f'viewBox="0 0 {width} {bottom + BOTTOM}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{bottom + BOTTOM}" fill="#ffffff"/>',
        _text(12, 24, title, size=16, weight="bold"),
        *(_text(12, 46 + 18 * n, text, colour=FAINT) for n, text in enumerate(subtitles)),
    ]
    for value in range(0, largest + 1, _tick(largest)):
        x = left + value * scale
        out.append(_line(x, TOP - 6, bottom, GRID))
        out.append(_text(x, bottom + 18, f"{value:,}", anchor="middle", colour=FAINT))
    if reference:
        x = left + reference * scale
        out.append(_line(x, TOP - 6, bottom, REFERENCE, dash="4 3"))
        out.append(_text(x, TOP - 12, "bf16", anchor="middle", colour=REFERENCE))
    for n, row in enumerate(rows):
        y = TOP + n * STEP
        colour = REFERENCE if row.formats == BASELINE else PLAIN
        end = left + row.tokens * scale
        out.append(_text(left - 8, y + 12, str(row.formats), anchor="end"))
        out.append(
            f'<rect x="{left}" y="{y}" width="{end - left:.1f}" height="{BAR}" fill="{colour}"/>'
        )
        figure = f"{row.tokens:,}" if row.tokens else "does not fit"
        if reference and row.tokens and row.formats != BASELINE:
            figure += f"  ({row.tokens / reference:.2f} × bf16)"
        out.append(_text(end + 6, y + 12, figure))
    return "\n".join([*out, "</svg>"]) + "\n"


def _tick(largest: int) -> int:
    """A round step that makes at most five."""
    power = 1
    while True:
        for step in (1, 2, 5):
            if step * power * 5 >= largest:
                return step * power
        power *= 10


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", colour: str = INK, size: int = 12,
    weight: str = "normal",
) -> str:  # fmt: skip
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    words = f'font-weight="{weight}">{escape(text)}</text>'
    # a white edge keeps lines out of the letters; not every viewer knows paint-order
    return (
        f'<text {place} fill="#ffffff" stroke="#ffffff" stroke-width="3" {words}\n'
        f'<text {place} fill="{colour}" {words}'
    )


def _line(x: float, top: float, bottom: float, colour: str, dash: str = "none") -> str:
    return (
        f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" stroke="{colour}" '
        f'stroke-dasharray="{dash}"/>'
    )
