"""`--op extend`: cases, plan, record and tables, on a machine without a GPU."""

import pytest
import torch

from kvq_attention import ops
from kvq_attention.bench import plan, problems, run, tables
from kvq_attention.bench.cases import Extend, parse_extends, parse_shape
from kvq_attention.bench.extend import CHOSEN, PEERS, SDPA, peer_row
from kvq_attention.bench.rows import Ceilings
from kvq_attention.errors import AttentionError

from ..decode.cases import ieee
from ..triton.cases import interpreted
from .test_plan import given_by


def tiny(**more):
    given = {"device": "cpu", "op": "extend", "quick": True, "cases": "6+20", "repeat": 1}
    return plan(**{**given, **more})


@pytest.fixture(scope="module")
def record():
    return run(tiny(backend="reference"))


@pytest.mark.parametrize(
    ("text", "case"),
    [("2k+8k", Extend(2048, 8192)), ("16+32k", Extend(16, 32768)), ("300+0", Extend(300, 0))],
)
def test_a_case_is_named_as_it_is_written(text, case):
    assert parse_extends(text) == (case,)
    assert parse_extends(case.name) == (case,)


@pytest.mark.parametrize("text", ["2k", "+8k", "0+8k", "2k+", "8x32k", "2k+8K", ""])
def test_a_case_that_is_none_is_refused(text):
    with pytest.raises(AttentionError, match="case"):
        parse_extends(text)


def test_products_are_counted_for_what_each_query_sees():
    # tokens see 4, 5 and 6 keys: two products of 2 · 8 operations each, 3 heads
    assert Extend(3, 3).flops(parse_shape("3/1x8")) == (4 + 5 + 6) * 2 * 2 * 8 * 3


def test_extend_is_measured_alone():
    asked = tiny()
    assert asked.ops == ("store", "extend") and asked.op == "extend"
    assert asked.cases == asked.store_tokens == asked.copy_tokens == ()
    assert plan(**given_by(tiny(quick=False, codecs="q4_0").command)) == tiny(
        quick=False, codecs="q4_0"
    )
    assert plan(device="cpu").op == "decode" and plan(device="cpu").extends == ()
    with pytest.raises(AttentionError, match="op 'store' must be one of decode, extend"):
        plan(device="cpu", op="store")
    with pytest.raises(AttentionError, match="'decode' is no operation here"):
        tiny(backend="decode=reference")


def test_every_format_is_measured(record):
    rows = record["extend"]
    assert [(row["codec"], row["route"]) for row in rows] == [
        (codec, CHOSEN) for codec in ("bf16", "q8_0", "q4_0")
    ]
    assert {row["backend"] for row in rows} == {"reference"}
    assert all(0 < row["error"] < 4e-3 and row["us"] > 0 for row in rows)
    assert rows[0]["speed_up"] == 1
    assert record["decode"] == record["store"] == record["copy"] == record["failed"] == []
    assert problems(record) == []
    (table,) = (table for table in tables(record) if table.title.startswith("extend"))
    assert table.title == "extend 6+20, page 16, 4/2x128, reference"
    assert table.rows[0][0] == "bf16, chosen"


def test_a_wrong_output_is_a_problem(monkeypatch):
    real = ops.extend
    monkeypatch.setattr(ops, "extend", lambda *args, **more: 1.1 * real(*args, **more))
    found = problems(run(tiny(codecs="fp8", backend="reference")))
    assert len(found) == 2  # bf16 and fp8
    assert all("the error 1.0e-01 is above" in problem for problem in found)


@interpreted
@ieee
def test_triton_is_measured_where_it_is_asked_for():
    found = run(tiny(codecs="q4_0", shape="1/1x64", cases="3+10", backend="triton"))
    assert {row["backend"] for row in found["extend"]} == {"triton"}
    assert [(row["codec"], row["route"]) for row in found["extend"]] == [
        *(("bf16", route) for route in (CHOSEN, "loop", "dense")),
        *(("q4_0", route) for route in (CHOSEN, "loop", "scratch", "dense")),
    ]
    assert problems(found) == []


def test_a_peer_attends_to_the_same_rows():
    (case,) = tiny().extends
    row = peer_row(tiny(), case, SDPA, Ceilings())
    assert row["peer"] in PEERS and row["error"] < 4e-3 and torch.isfinite(torch.tensor(row["us"]))
