"""The pages that tools/ write from records of `kvq bench attention`."""

import importlib.util
import sys
from pathlib import Path

import pytest

from kvq_attention import bench
from kvq_cli.plots import bar_chart

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(
    not (ROOT / "noxfile.py").is_file(), reason="tools are in the repository, not in an sdist"
)


@pytest.fixture(scope="module")
def page():
    """tools/attention_page.py as a module."""
    spec = importlib.util.spec_from_file_location(
        "attention_page", ROOT / "tools" / "attention_page.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def record():
    plan = bench.plan(device="cpu", quick=True, backend="reference", cases="1x20", repeat=1)
    return bench.run(plan)


AT = ("q4_0", "8x32k")
LAYER = {"shape": "32/8x128", "backend": "triton"}


@pytest.fixture
def h200(record):
    """A record as if of an H200: each decode as fast as its name says below."""
    shares = {"bf16": 0.93, "q8_0": 0.80, "q4_0": 0.50}
    speeds = {"bf16": 1.0, "q8_0": 1.6, "q4_0": 1.7}
    rows = [
        row | LAYER | {"case": case, "share_of_read": shares[codec], "speed_up": speeds[codec]}
        for row in record["decode"]
        if (codec := row["codec"])
        for case in ("8x32k", "32x8k", "1x128k")
    ]
    store = [row | LAYER | {"tokens": 16384, "gb_per_s": 2000.0} for row in record["store"]]
    return record | {
        "hardware": "NVIDIA H200, 132 multiprocessors",
        "shapes": ["32/8x128"],
        "decode": rows,
        "store": store,
    }


def test_without_a_record_the_page_says_so(page):
    text = page.markdown({})
    assert text.startswith("# Attention speed") and "Nothing is recorded yet." in text


def test_a_record_is_shown_with_its_machine_command_and_every_row(page, record):
    text = page.markdown({"attention-cpu": record})
    assert "Nothing is recorded" not in text
    for said in (
        record["hardware"],
        record["command"],
        "(attention-cpu.json)",
        "attention-cpu.svg",
    ):
        assert said in text
    lines = [line for line in text.splitlines() if line.startswith("| q4_0 |")]
    assert len(lines) == len(bench.tables(record)) - 1  # decode, store, copy; not the ceilings
    assert "### Bars" not in text
    assert "<svg" in bar_chart(record)


def test_every_row_of_a_table_has_as_many_cells_as_its_head(page, record):
    for shown in bench.tables(record):
        lines = page.table(shown).splitlines()[2:]
        assert {line.count("|") for line in lines} == {len(shown.columns) + 1}


def test_bars_name_the_lowest_figure_and_whether_it_reaches_them(page, h200):
    verdicts = {row[0]: row[1:] for row in page.bars(h200, "triton").rows}
    assert verdicts["bf16 ≥ 92% of the read ceiling"] == (
        "0.93",
        "bf16, 8x32k, page 16",
        "met",
    )
    assert verdicts["q4_0 ≥ 1.8 × bf16"] == ("1.7", "q4_0, 8x32k, page 16", "missed")
    assert verdicts["fp8, fp8_e4m3, q8_0 ≥ 1.5 × bf16"][2] == "met"
    assert verdicts["store ≥ 2,000 GB/s, but for iso"] == ("2000", "bf16, 16384", "met")
    assert verdicts["store of iso ≥ 500 GB/s"] == ("-", "-", "not measured")
    assert "### Bars of triton" in page.markdown({"attention-h200": h200})


def test_bars_are_of_their_layer_alone(page, h200):
    other = [row | {"shape": "8/8x128", "speed_up": 0.1} for row in h200["decode"]]
    assert page.bars(h200 | {"decode": [*other, *h200["decode"]]}, "triton") == page.bars(
        h200, "triton"
    )
    elsewhere = h200 | {"shapes": ["8/8x128"], "decode": other}
    assert "### Bars" not in page.markdown({"attention-h200": elsewhere})


def test_bars_of_cuda_are_of_its_rows_and_those_of_triton_of_tritons(page, h200):
    def rows(codec, us, **other):
        row = next(row for row in h200["decode"] if (row["codec"], row["case"]) == AT)
        return [row | {"codec": codec, "us": us, "backend": "cuda", "speed_up": 3.0} | other]

    added = [
        *rows("q4_0", 80.0, share_of_read=0.81),
        *rows("iso4", 80.0, share_of_read=0.79, speed_up=2.7),
        *rows("iso3", 70.0, share_of_read=0.66),
        *rows("q8_0", 70.0, case="1x2k", shape="64/8x128", speed_up=0.95),
        *rows("q8_0", 70.0, case="1x1k", speed_up=0.5),
    ]
    both = h200 | {"decode": [*h200["decode"], *added]}
    assert page.bars(both, "triton") == page.bars(h200, "triton")
    verdicts = {row[0]: row[1:] for row in page.bars(both, "cuda").rows}
    four = "nvfp4, q4_0, iso4 ≥"
    assert verdicts[f"{four} 80% of the read ceiling at 8x32k and 32x8k"] == (
        *("0.79", "iso4, 8x32k, page 16", "missed"),
    )
    assert verdicts[f"{four} 2.8 × bf16 at 8x32k"][::2] == ("2.7", "missed")
    assert verdicts[f"{four} 70% of the read ceiling at 1x128k and 128x1k"][2] == "not measured"
    assert verdicts["iso3 faster than iso4"][::2] == ("1.143", "met")
    slow = verdicts["packed formats not slower than bf16, at every layer"]
    assert slow == ("0.95", "q8_0, 1x2k, page 16, 64/8x128", "missed")
    text = page.markdown({"attention-h200": both})
    assert "### Bars of triton" in text and "### Bars of cuda" in text


def test_a_missing_figure_or_an_equal_speed_is_not_faster(page, h200):
    h200["decode"] = [row | {"speed_up": 1.0} for row in h200["decode"]]
    faster = page.bars(h200, "triton").rows[2]
    assert faster[0].startswith("packed formats faster") and faster[3] == "missed"


def test_what_is_wrong_or_left_out_is_on_the_page(page, record):
    failed = record | {
        "failed": [{"what": "decode 1x20, page 16, q8_0", "why": "RuntimeError: x"}],
        "left_out": ["store 1 tokens, q4_0"],
    }
    text = page.markdown({"attention-cpu": failed})
    assert "- Not as it should be: decode 1x20, page 16, q8_0 failed: RuntimeError: x." in text
    assert "- Not measured: store 1 tokens, q4_0." in text
