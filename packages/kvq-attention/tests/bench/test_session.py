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

    def decode_row(a_plan, case, spot, told, ceilings):
        if spot.formats.name == "q8_0":
            raise RuntimeError("out of resource: shared memory\nat length")
        return real(a_plan, case, spot, told, ceilings)

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


@interpreted
@ieee
def test_backends_and_layers_are_measured_beside_each_other():
    several = plan(
        device="cpu", backend=["triton", "reference"], shape="2/1x64,1/1x64,2/2x64", repeat=1,
        codecs="q4_0", cases="1x17,2x16", store_tokens="3", copy_tokens="16",
    )  # fmt: skip
    found = run(several)
    assert problems(found) == found["left_out"] == found["not_served"] == []
    points = [(row["shape"], row["case"], row["codec"], row["backend"]) for row in found["decode"]]
    assert points == [
        (shape, case, codec, backend)
        for shape in ("2/1x64", "1/1x64", "2/2x64")
        for case in ("1x17", "2x16")
        for codec in ("bf16", "q4_0")
        for backend in ("triton", "reference")
    ]
    # caches of layers that differ in query heads are alike
    for table in ("store", "copy"):
        assert [(row["shape"], row["backend"]) for row in found[table][:4:2]] == [
            ("2/1x64", "triton"),
            ("2/1x64", "triton"),
        ]
        assert {row["shape"] for row in found[table]} == {"2/1x64", "2/2x64"}
    assert found["shapes"] == ["2/1x64", "1/1x64", "2/2x64"] and found["schema"] == 2
    assert found["plot"]["label"] == "{codec}, {backend}"
    assert found["title"].endswith(", layers 2/1x64, 1/1x64, 2/2x64")
    names = [task.name for task in session.tasks(several)]
    assert names[0] == "decode 1x17, page 16, bf16, 2/1x64, triton"
    assert len(set(names)) == len(names)


def test_speed_ups_are_over_the_fastest_bf16_whatever_ran_it():
    def row(codec, backend, us, **other):
        at = {"case": "1x4k", "shape": "32/8x128", "page_tokens": 16} | other
        return {"codec": codec, "backend": backend, "us": us, **at}

    rows = [
        row("bf16", "triton", 20.0),
        row("bf16", "cuda", 16.0),
        row("q4_0", "triton", 10.0),
        row("q4_0", "cuda", 8.0),
        row("q4_0", "cuda", 8.0, shape="8/8x128"),
        row("q4_0", "cuda", 8.0, page_tokens=64),
    ]
    session.compare_with_bf16(rows)
    assert [each["speed_up"] for each in rows] == [0.8, 1.0, 1.6, 2.0, None, None]
