"""`kvq bench engine --extend-routes`: each row is of steps by the route that it names."""

import json
from collections import Counter

import pytest
import torch
from typer.testing import CliRunner

from kvq_attention import UnsupportedError, launches, ops
from kvq_attention.bench.extend import CHOSEN
from kvq_attention.routes import DENSE, LOOP, SCRATCH, Route
from kvq_cli import benching
from kvq_cli.benching import engines, steps
from kvq_cli.benching.plan import EnginePlan, RandomModel, parse_steps
from kvq_cli.engine.runner import ModelRunner
from kvq_cli.main import app
from kvq_cli.plots import bar_chart

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = ["--random", "1x64x64", "--shape", "4/2x64", "--device", "cpu"]
INTERPRETED = ["--attention-backend", "extend=triton"]
[CASE] = parse_steps("8+16")


@pytest.fixture
def interpreted(monkeypatch):
    """Triton's kernels run on the CPU, where a step takes long enough without a median."""
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter is off where there is a GPU")
    monkeypatch.setattr("kvq_cli.benching.plan.LEAST_PROMPTS", 1)


def invoke(*given):
    return CliRunner().invoke(app, ["bench", "engine", *TINY, "--extend-routes", *given])


def tiny(cache, **given):
    """A plan and an engine for CASE."""
    model = RandomModel.parse("1x64x64", "4/2x64")
    plan = EnginePlan(model, (cache,), (CASE,), device="cpu", repeat=1, **given)
    return engines.make_engine(engines.make_model(plan), plan, cache, CASE)


def test_prompts_over_a_past_are_measured_by_each_route(interpreted, tmp_path):
    path = tmp_path / "record.json"
    given = ["--kv-cache-dtype", "bf16,q8_0", "--cases", "2x20,8+0,8+16", "--repeat", "1"]
    result = invoke(*INTERPRETED, *given, "--json", str(path))
    assert result.exit_code == 0, result.output
    record = json.loads(path.read_text())
    found = [(r["case"], r["cache"], r["route"], r["took"]) for r in record["rows"]]
    once = [("2x20", "bf16", CHOSEN, ""), ("2x20", "q8_0", CHOSEN, "")]
    once += [("8+0", "bf16", CHOSEN, LOOP), ("8+0", "q8_0", CHOSEN, LOOP)]
    ways = [(CHOSEN, LOOP), (LOOP, LOOP), (SCRATCH, SCRATCH), (DENSE, "dense (flash_for_cpu)")]
    each = [("8+16", "bf16", *way) for way in ways if way[0] != SCRATCH]
    assert found == [*once, *each, *(("8+16", "q8_0", *way) for way in ways)]
    [left] = record["left_out"]
    assert (left["case"], left["cache"], left["route"]) == ("8+16", "bf16", SCRATCH)
    assert "read as they are stored" in left["reason"]
    assert record["command"].endswith("--repeat 1 --extend-routes")
    output = " ".join(result.output.split())
    assert "chosen: loop" in output and "scratch" in output and "dense (" not in output
    assert "left out: 8+16, bf16, scratch: all rows" in output
    labels = {record["plot"]["label"].format_map(row) for row in record["rows"][-4:]}
    assert labels == {f"q8_0, {way}" for way, _ in ways}
    assert all(label in bar_chart(record) for label in labels)


def test_formats_by_layer_have_the_routes_of_all_of_them(interpreted):
    size = RandomModel.parse("2x64x64", "4/2x64")
    cache = "0:bf16,1:q8_0"
    given = {"device": "cpu", "attention_backend": "extend=triton", "extend_routes": True}
    plan = EnginePlan(size, (cache,), (CASE,), repeat=1, **given)
    record = benching.run(plan, "", lambda *_: None)
    assert [row["route"] for row in record["rows"]] == [CHOSEN, LOOP, DENSE]
    [left] = record["left_out"]
    assert left["route"] == SCRATCH and "nothing of this step goes through" in left["reason"]


@pytest.mark.parametrize("route", [LOOP, SCRATCH, DENSE])
def test_a_forced_route_is_the_one_that_is_launched(interpreted, route):
    engine = tiny("q8_0", attention_backend="extend=triton")
    for given, wanted in ((Route(route), route), (None, LOOP)):
        engines.about_to_extend(engine, CASE, given)
        before = launches.routes()
        engine.step()
        new = Counter(launches.routes())
        new.subtract(before)
        assert {name.split()[0] for (_, _, name), n in new.items() if n} == {wanted}


def test_routes_take_turns_after_each_was_tried(monkeypatch):
    """Turns go back and forth, and what a route refuses is not measured."""
    order = []

    def extend(*args, route, **given):
        order.append(CHOSEN if route is None else route.name)
        if route is not None and route.name == DENSE:
            raise UnsupportedError("no kernel")
        return real(*args, **given)

    real = ops.extend
    monkeypatch.setattr(ops, "extend", extend)
    ways = {CHOSEN: None, LOOP: Route(LOOP), DENSE: Route(DENSE)}
    found, refused = steps.prompts(tiny("fp32"), CASE, 2, ways)
    assert refused == {DENSE: "no kernel"}
    assert [(each.route, len(each.times)) for each in found] == [(CHOSEN, 2), (LOOP, 2)]
    assert order == [CHOSEN, LOOP, DENSE, *[LOOP, CHOSEN, CHOSEN, LOOP] * 2]


def test_a_refusal_of_the_chosen_route_ends_the_run(monkeypatch):
    def extend(*_, **__):
        raise UnsupportedError("nothing serves this")

    monkeypatch.setattr(ops, "extend", extend)
    with pytest.raises(UnsupportedError, match="nothing serves this"):
        steps.prompts(tiny("fp32"), CASE, 1, {CHOSEN: None})


@pytest.mark.parametrize("case", ["2x20", "8+0"])
def test_a_step_that_failed_is_not_a_fast_one(monkeypatch, case):
    def forward(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(ModelRunner, "forward", forward)
    size = RandomModel.parse("1x64x64", "4/2x64")
    plan = EnginePlan(size, ("fp32",), parse_steps(case), device="cpu", repeat=1)
    with pytest.raises(RuntimeError, match="was to be timed failed: MemoryError: no room"):
        benching.run(plan, "", lambda *_: None)


@pytest.mark.parametrize(("repeat", "count"), [(1, 5), (7, 7), (20, 10)])
def test_so_many_prompts_are_timed_that_a_median_says_something(repeat, count):
    plan = EnginePlan(RandomModel.parse("1x64x64", "4/2x64"), ("fp32",), (CASE,), repeat=repeat)
    assert plan.prompt_steps == count


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--cases", "8+16"], "go by reference, which has one way only"),
        (["--cases", "2x20,8+0"], "no case is a prompt over a past: 2x20, 8+0; give"),
    ],
)
def test_what_has_nothing_to_compare_is_refused_before_weights(given, said, monkeypatch):
    monkeypatch.setattr(engines, "random_llama", lambda *_: pytest.fail("weights were made"))
    result = invoke(*given)
    output = " ".join(result.output.split())
    assert result.exit_code == 2 and "--extend-routes" in output and said in output


def test_without_the_option_rows_name_no_route():
    plan = EnginePlan(RandomModel.parse("1x64x64", "4/2x64"), ("fp32",), (CASE,), device="cpu")
    record = benching.run(plan, "", lambda *_: None)
    [row] = record["rows"]
    assert not {"route", "took"} & row.keys() and "left_out" not in record
    assert "route" not in benching.tables(record)[0].columns
    assert record["plot"]["label"] == "{cache}" and "route" not in record["what"]
