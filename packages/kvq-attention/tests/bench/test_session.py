import json

import pytest

from kvq_attention.bench import as_json, plan, problems, run, session, tables

from ..decode.cases import ieee
from ..triton.cases import interpreted


@pytest.fixture(scope="module")
def quick():
    return plan(device="cpu", quick=True, backend="reference", cases="2x20", repeat=2)


@pytest.fixture(scope="module")
def record(quick):
    return run(quick)


def test_a_run_measures_every_format_and_names_the_backend_that_ran(quick, record):
    names = [f.name for f in quick.formats]
    for table in ("decode", "store", "copy"):
        assert [row["codec"] for row in record[table]] == names
        assert {row["backend"] for row in record[table]} == {"reference"}
        assert all(row["us"] > 0 and row["how"] == "clock" for row in record[table])
    assert problems(record) == record["left_out"] == record["failed"] == []
    assert record["ceilings"] == {"read_gb_per_s": None, "copy_gb_per_s": None, "ways": []}


def test_figures_follow_from_each_other(record):
    base, *others = record["decode"]
    assert base["speed_up"] == 1
    for row in others:
        assert row["speed_up"] == pytest.approx(base["us"] / row["us"], abs=1e-3)
    assert base["bytes"] == 2 * 20 * 2 * 2 * 256  # requests, tokens, K and V, heads, row
    assert base["gb_per_s"] == pytest.approx(base["bytes"] / base["us"] / 1e3, abs=0.06)
    stored = record["store"][0]
    assert stored["bytes"] == 2 * base["bytes"] * stored["tokens"] // 40  # read, and written


def test_a_record_says_where_when_and_how(quick, record):
    assert record["kind"] == "attention"
    assert record["command"] == quick.command
    assert {"python", "torch", "kvq-attention", "kvq-codecs"} <= record["versions"].keys()
    assert record["hardware"] and record["date"] and record["seconds"] > 0
    assert json.loads(as_json(record)) == record


def test_two_records_have_their_keys_in_one_order(quick, record):
    def keys(value):
        if isinstance(value, dict):
            return [(key, keys(each)) for key, each in value.items()]
        return [keys(each) for each in value] if isinstance(value, list) else None

    assert keys(run(quick)) == keys(record)


def test_a_kernel_that_fails_costs_no_other_figure(quick, monkeypatch):
    real = session.decode_row

    def decode_row(a_plan, case, page_tokens, formats, ceilings):
        if formats.name == "q8_0":
            raise RuntimeError("out of resource: shared memory\nat length")
        return real(a_plan, case, page_tokens, formats, ceilings)

    monkeypatch.setattr(session, "decode_row", decode_row)
    found = run(quick)
    assert [row["codec"] for row in found["decode"]] == ["bf16", "q4_0"]
    name = "decode 2x20, page 16, q8_0"
    assert problems(found) == [f"{name} failed: RuntimeError: out of resource: shared memory"]


def test_the_budget_ends_a_run_between_two_measurements(quick, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(session.time, "monotonic", lambda: 100.0 * next(clock))
    found = run(quick)  # 330 seconds: two are begun, each of which looks at the clock twice
    assert [row["codec"] for row in found["decode"]] == ["bf16", "q8_0"]
    assert found["left_out"][0] == "decode 2x20, page 16, q4_0"
    assert len(found["left_out"]) == 9 - 2
    assert tables(found)


def test_a_run_that_is_cut_off_leaves_what_it_measured(quick, monkeypatch):
    kept = []

    def keep(found):
        kept.append(as_json(found))
        if len(kept) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(quick, keep=keep)
    assert [len(json.loads(text)["decode"]) for text in kept] == [1, 2]


def test_compiling_ahead_runs_every_op_and_shape_in_other_processes(quick):
    jobs = plan(device="cpu", quick=True, backend="reference", cases="2x20", repeat=1, jobs=1)
    told = []
    found = run(jobs, tell=lambda *what: told.append(what))
    assert problems(found) == []
    assert told[0] == ("kernels and ceilings", 0, 9)
    assert [done for _, done, _ in told[1:]] == list(range(9))


@interpreted
@ieee
def test_the_backend_of_a_row_is_the_one_whose_kernels_ran():
    tiny = plan(
        device="cpu", backend="triton", shape="2/1x64", codecs="q4_0", cases="1x17",
        store_tokens="3", copy_tokens="16", repeat=1,
    )  # fmt: skip
    found = run(tiny)
    assert problems(found) == []
    rows = [row for table in ("decode", "store", "copy") for row in found[table]]
    assert [row["backend"] for row in rows] == ["triton"] * 6
