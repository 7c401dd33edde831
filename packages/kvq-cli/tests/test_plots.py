"""Benchmark records as charts."""

import re
import xml.etree.ElementTree as ET

from kvq_cli.plots import COLOURS, bar_chart, has_figures

SVG = "{http://www.w3.org/2000/svg}"


def bars(svg):
    """Widths of the bars of each colour, in drawing order; the legend's squares left out."""
    found = {}
    for rect in ET.fromstring(svg).iter(f"{SVG}rect"):
        if rect.get("fill") in COLOURS and rect.get("height") != "10":
            found.setdefault(COLOURS.index(rect.get("fill")), []).append(float(rect.get("width")))
    return found


def test_a_row_is_a_group_of_bars_as_long_as_its_values():
    rows = [{"name": "a", "x": 2.0, "y": 1.0}, {"name": "b & c", "x": 4.0}, {"name": "none"}]
    svg = bar_chart({"title": "T", "plot": {"label": "{name}", "values": ["x", "y"]}, "rows": rows})
    drawn = bars(svg)
    assert drawn[0][1] == 2 * drawn[0][0] == 4 * drawn[1][0]
    assert "b &amp; c" in svg and "none" not in svg


def test_a_series_makes_groups_of_rows_with_one_label():
    decode = [
        {"codec": codec, "case": case, "page": page, "speed": speed}
        for codec, case, page, speed in [
            ("bf16", "8x32k", 64, 1.0),
            ("bf16", "1x4k", 64, 1.0),
            ("q4_0", "8x32k", 64, 2.0),
            ("q4_0", "1x4k", 64, 1.5),
            ("q4_0", "1x4k", 16, 99.0),
        ]
    ]
    plot = {
        "of": "decode", "where": {"page": 64}, "label": "{codec}", "series": "case",
        "values": "speed", "title": "times as fast",
    }  # fmt: skip
    svg = bar_chart({"title": "Attention", "plot": plot, "decode": decode})
    drawn = bars(svg)
    assert [round(width / drawn[0][0], 2) for width in drawn[0]] == [1, 2]
    assert [round(width / drawn[1][0], 2) for width in drawn[1]] == [1, 1.5]
    assert "99" not in re.sub(r"<svg.*?>", "", svg)
    assert "Attention, times as fast" in svg


def test_a_record_without_figures_is_an_empty_chart():
    plot = {"label": "{codec}", "values": ["x"]}
    empty = {"title": "T", "plot": plot, "rows": [{"codec": "a", "x": None}]}
    assert bars(bar_chart(empty)) == {}
    assert not has_figures(empty)
    assert has_figures(empty | {"rows": [{"codec": "a", "x": 1.0}]})
