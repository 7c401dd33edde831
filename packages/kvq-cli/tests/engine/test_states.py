"""States of linear-attention layers: whose they are, and what becomes of them."""

from __future__ import annotations

import pytest
import tiny_models
from graph_captures import TRITON, capture_here, replayed
from tiny_families import tiny
from tiny_models import generate, greedy, random_prompt, run, tokens_of

from kvq_cli.config import geometry
from kvq_cli.sizing import Limits

pytestmark = pytest.mark.usefixtures("one_thread")

NEW_TOKENS = 12


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5"])
def model(request):
    return tiny(request.param)


@pytest.fixture(params=[0, 2, 8], ids=["eager", "2 replayed", "all replayed"])
def make_engine(request):
    """Engines that replay steps of decodes, without a GPU; what they do must not show."""
    replayed.clear()

    def made(model, **options):
        engine = tiny_models.make_engine(model, cuda_graph_max_bs=request.param, **options)
        engine.runner._capture = lambda: capture_here
        return engine

    yield made
    assert bool(replayed) <= bool(request.param)


def test_memory_is_what_the_plan_prices(model, make_engine):
    shape = geometry(model.config.to_dict())
    engine = make_engine(model, max_running_requests=3, state_snapshots=5)
    limits = Limits(256, 4, 3, 16, value_bytes=4, state_snapshots=5)
    priced = limits.state_bytes(shape), limits.snapshot_bytes(shape)
    states = engine.runner.states
    assert priced == (3 * states.request_bytes, 5 * states.request_bytes)
    assert states.nbytes == sum(priced) > 0


def test_more_requests_than_states_take_turns(model, make_engine):
    prompts = {f"r{n}": random_prompt(9 + n, n) for n in range(7)}
    want = {name: generate(model, prompt, NEW_TOKENS) for name, prompt in prompts.items()}
    engine = make_engine(model, max_running_requests=2)
    for _ in range(2):  # states that others left are not seen
        got = run(engine, {name: (p, greedy(NEW_TOKENS)) for name, p in prompts.items()})
        assert {name: tokens_of(deltas) for name, deltas in got.items()} == want


def test_a_cancelled_requests_state_is_another_ones_later(model, make_engine):
    engine = make_engine(model, max_running_requests=1)
    engine.add("gone", random_prompt(20), greedy(40))
    for _ in range(5):
        engine.step()
    engine.cancel("gone")
    prompt = random_prompt(30, 1)
    got = run(engine, {"next": (prompt, greedy(NEW_TOKENS))})
    assert tokens_of(got["next"]) == generate(model, prompt, NEW_TOKENS)


@pytest.mark.parametrize("running", [4, 8])
def test_choices_go_on_from_copies_of_their_prompts_state(model, make_engine, running):
    prompt, names = random_prompt(30), ["a", "b", "c"]
    engine = make_engine(model, max_running_requests=running)
    engine.add("a", prompt, greedy(NEW_TOKENS), names[1:])
    engine.add("other", random_prompt(21), greedy(NEW_TOKENS))
    found = {name: [] for name in (*names, "other")}
    steps = 0
    while engine.has_work:
        if steps == 7:
            engine.cancel("a")  # from which the others had their copies
        for name, delta in engine.step():
            found[name] += delta.token_ids
        steps += 1
    want = generate(model, prompt, NEW_TOKENS)
    assert found["b"] == found["c"] == want
    assert found["other"] == generate(model, random_prompt(21), NEW_TOKENS)
    assert want[: len(found["a"])] == found["a"] != want


def test_choices_take_over_the_place_of_a_first_that_left_with_its_prompt(model, make_engine):
    prompt, late = random_prompt(30), random_prompt(25)
    engine = make_engine(model, max_running_requests=3, max_prefill_tokens=64)
    engine.add("a", prompt, greedy(NEW_TOKENS), ["b", "c"])
    found = {name: [] for name in "abcd"}
    while not found["a"]:
        for name, delta in engine.step():
            found[name] += delta.token_ids
    engine.cancel("a")
    engine.add("d", late, greedy(NEW_TOKENS))
    while engine.has_work:
        for name, delta in engine.step():
            found[name] += delta.token_ids
    assert found["b"] == found["c"] == generate(model, prompt, NEW_TOKENS)
    assert found["d"] == generate(model, late, NEW_TOKENS)
    assert len(found["a"]) == 1


@pytest.mark.parametrize("at", [1, 4, 9])
@pytest.mark.parametrize("layer", [0, 3])
def test_a_step_that_failed_half_way_is_computed_again_from_the_same_states(
    model, make_engine, at, layer, monkeypatch
):
    prompts = {f"r{n}": random_prompt(20 + n, n) for n in range(3)}
    want = {name: generate(model, prompt, NEW_TOKENS) for name, prompt in prompts.items()}
    engine = make_engine(model, max_prefill_tokens=32)
    forward, calls = engine.runner.forward, []
    mlp = model.model.layers[layer].mlp

    def fails(*_):
        raise RuntimeError("no more memory")

    def failing(step):
        calls.append(step)
        if len(calls) != at:
            return forward(step)
        handle = mlp.register_forward_hook(fails)
        try:
            return forward(step)
        finally:
            handle.remove()

    monkeypatch.setattr(engine.runner, "forward", failing)
    got = run(engine, {name: (p, greedy(NEW_TOKENS)) for name, p in prompts.items()})
    assert len(calls[at - 1].work) > 1
    assert {name: tokens_of(deltas) for name, deltas in got.items()} == want


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_step_that_fails_as_it_is_replayed_is_computed_again(model, rows, monkeypatch):
    """What the others' graphs made of their states counts, though graphs are made anew."""
    replayed.clear()
    prompts = {f"r{n}": random_prompt(20 + n, n) for n in range(3)}
    want = {name: generate(model, prompt, NEW_TOKENS) for name, prompt in prompts.items()}
    engine = tiny_models.make_engine(model, max_prefill_tokens=96, cuda_graph_max_bs=rows)
    engine.runner._capture = lambda: capture_here
    forward, decoded, failed, again = engine.runner.forward, [], [], []

    def failing(step):
        before = len(replayed)
        logits = forward(step)
        if failed == [3] and [request.request_id for request in step.decodes] == ["r0"]:
            again.append(len(replayed) - before)
        decoded.extend([step] * (not step.extends))
        culprit = "r1" in {request.request_id for request in step.decodes}
        if len(decoded) >= 5 and culprit and len(failed) < 2:
            failed.append(len(step.decodes))
            raise RuntimeError("no more memory")
        return logits

    monkeypatch.setattr(engine.runner, "forward", failing)
    got = run(engine, {name: (p, greedy(NEW_TOKENS)) for name, p in prompts.items()})
    assert failed == [3, 1] and again == [1], "what failed is no reason not to replay"
    assert tokens_of(got["r0"]) == want["r0"] and tokens_of(got["r2"]) == want["r2"]
    assert got["r1"][-1].finish_reason == "error"


@pytest.mark.parametrize("broken", ["r0", "r1", "r2"])
def test_a_request_whose_logits_are_no_numbers_leaves_the_others_states(model, broken, monkeypatch):
    """Any row of a replayed step: those before and behind it count."""
    prompts = {f"r{n}": random_prompt(20 + n, n) for n in range(3)}
    engine = tiny_models.make_engine(model, max_prefill_tokens=96, cuda_graph_max_bs=4)
    engine.runner._capture = lambda: capture_here
    forward, steps = engine.runner.forward, []

    def breaking(step):
        logits = forward(step).clone()
        names = [request.request_id for request in step.decodes]
        steps.extend([names] * (len(names) == 3))
        if len(steps) == 4 and broken in names:
            logits[names.index(broken)] = float("nan")
        return logits

    monkeypatch.setattr(engine.runner, "forward", breaking)
    got = run(engine, {name: (p, greedy(NEW_TOKENS)) for name, p in prompts.items()})
    for name, prompt in prompts.items():
        if name == broken:
            assert "not finite" in got[name][-1].error
        else:
            assert tokens_of(got[name]) == generate(model, prompt, NEW_TOKENS)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_a_gpu_replays_decodes_and_their_states(family):
    there = tiny(family, head_dim=64).to("cuda")
    work = {f"r{n}": (random_prompt(20 + n, n), greedy(NEW_TOKENS + n)) for n in range(5)}
    options = {"page_tokens": 16, "max_prefill_tokens": 128, "backends": TRITON}
    eager = run(tiny_models.make_engine(there, **options), work)
    assert {deltas[-1].finish_reason for deltas in eager.values()} == {"length"}
    for rows in (2, 8):
        engine = tiny_models.make_engine(there, cuda_graph_max_bs=rows, **options)
        assert run(engine, work) == eager
        making = engine.runner._graphs.making
        # torch has mixtures of experts in float32 wait for the device: those are served without
        assert making.failed or making.graphs
        assert not making.failed or family == "qwen3_next"


def test_memory_of_graphs_is_free_again_when_they_are_gone(model):
    engine = tiny_models.make_engine(model, cuda_graph_max_bs=4, num_pages=128)
    engine.runner._capture = lambda: capture_here
    states = engine.runner.states
    assert engine.runner.prepare() == (3, 0)
    inputs, matrices = states._replayed
    assert inputs.shape[1] == matrices.shape[1] == 4, "what the workspace counts"
    run(engine, {"a": (random_prompt(9), greedy(4))})
    engine.rebuild(num_tokens=256)
    assert states._replayed is None
    assert tokens_of(run(engine, {"a": (random_prompt(9), greedy(4))})["a"]) == generate(
        model, random_prompt(9), 4
    )
    assert states._replayed is not None
