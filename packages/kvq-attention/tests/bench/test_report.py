import copy

import pytest

from kvq_attention.bench import notes, problems, tables


def timed(us, **others):
    return {"how": "graph", "calls": 4, "us": us, "us_p10": us, "us_p90": us, **others}


@pytest.fixture
def record():
    """Of an invented machine."""
    decode = {"case": "8x32k", "shape": "32/8x128", "page_tokens": 16, "backend": "triton"}
    moved = {"bytes": 1, "gb_per_s": 4000.0, "share_of_read": 0.8912, "floor_us": 200.0}
    store = {"gb_per_s": 2345.6, "share_of_copy": 0.55, "floor_us": 9.0, "exact": True}
    return {
        "shapes": ["32/8x128"],
        "hardware": "GPU",
        "ceilings": {"read_gb_per_s": 4489.0, "copy_gb_per_s": 4249.5, "ways": []},
        "decode": [
            decode | {"codec": "bf16", **timed(250.0), **moved, "error": 2e-3, "speed_up": 1.0},
            decode | {"codec": "q4_0", **timed(125.0), **moved, "error": 1e-3, "speed_up": 2.0},
        ],
        "peers": [],
        "store": [
            {"tokens": 256, "shape": "32/8x128", "codec": "q4_0", "backend": "triton"}
            | {**timed(1234.5), **store}
        ],
        "copy": [],
        "failed": [],
        "left_out": [],
    }


def test_tables_have_a_line_a_format_and_say_what_ran(record):
    ceilings, decode, store = tables(record)
    assert [row[1] for row in ceilings.rows] == ["4,489", "4,250"]
    assert decode.title == "decode 8x32k, page 16, 32/8x128, triton"
    assert decode.rows[1] == ("q4_0", "125", "200", "4,000", "89.1%", "2.00", "1.0e-03")
    assert store.title == "store of 256 tokens, 32/8x128, triton"
    assert store.rows == (("q4_0", "1,234", "2,346", "55.0%"),)


def test_as_text_columns_end_where_their_heads_do(record):
    title, head, *lines = str(tables(record)[1]).splitlines()
    assert title.startswith("decode 8x32k")
    assert {len(line) for line in lines} == {len(head)}


def test_a_figure_that_is_not_there_is_a_dash(record):
    record["decode"][0] |= {"share_of_read": None, "floor_us": None, "speed_up": None}
    assert tables(record)[1].rows[0][2:6] == ("-", "4,000", "-", "-")


def test_what_is_wrong_is_named(record):
    assert problems(record) == []
    wrong = copy.deepcopy(record)
    wrong["decode"][0]["error"] = 4.1e-3
    wrong["decode"][1]["error"] = None
    wrong["store"][0]["exact"] = False
    wrong["failed"] = [{"what": "copy pages of 64 tokens, q4_0", "why": "RuntimeError: x"}]
    assert problems(wrong) == [
        "8x32k, page 16, 32/8x128, bf16 on triton: the error 4.1e-03 is above 0.004",
        "8x32k, page 16, 32/8x128, q4_0 on triton: the error not finite is above 0.004",
        "q4_0: bytes stored are not those expected",
        "copy pages of 64 tokens, q4_0 failed: RuntimeError: x",
    ]


def test_a_record_of_schema_1_named_its_shape_once(record):
    old = copy.deepcopy(record) | {"shape": "32/8x128"}
    for row in [*old["decode"], *old["store"]]:
        del row["shape"]
    del old["shapes"]
    old["decode"][0]["error"] = None
    assert tables(old)[1:] == tables(record | {"decode": old["decode"]} | {"shape": "32/8x128"})[1:]
    assert problems(old)[0].startswith("8x32k, page 16, 32/8x128, bf16 on triton: the error")


def test_backends_beside_each_other_share_a_table(record):
    record["decode"] += [row | {"backend": "cuda", "us": 100.0} for row in record["decode"]]
    _, decode, store = tables(record)
    assert decode.title == "decode 8x32k, page 16, 32/8x128"
    assert [row[:2] for row in decode.rows] == [
        ("bf16, triton", "250"),
        ("q4_0, triton", "125"),
        ("bf16, cuda", "100"),
        ("q4_0, cuda", "100"),
    ]
    assert store.title.endswith(", triton")


def test_what_a_backend_does_not_serve_is_noted(record):
    assert notes(record | {"not_served": ["decode of fp32: cuda lacks it"]}) == [
        "not served: decode of fp32: cuda lacks it"
    ]
    assert notes(record) == []
