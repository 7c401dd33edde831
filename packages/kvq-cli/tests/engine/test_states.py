"""States of linear-attention layers: whose they are, and what becomes of them."""

from __future__ import annotations

import pytest
import torch
from tiny_families import tiny
from tiny_models import generate, greedy, make_engine, random_prompt, run, tokens_of

from kvq_cli.compose import ServeOptions, check_graphs
from kvq_cli.config import ConfigError, geometry
from kvq_cli.sizing import Limits

pytestmark = pytest.mark.usefixtures("one_thread")

NEW_TOKENS = 12


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5"])
def model(request):
    return tiny(request.param)


def test_memory_is_what_the_plan_prices(model):
    shape = geometry(model.config.to_dict())
    engine = make_engine(model, max_running_requests=3, state_snapshots=5)
    limits = Limits(256, 4, 3, 16, value_bytes=4, state_snapshots=5)
    priced = limits.state_bytes(shape), limits.snapshot_bytes(shape)
    states = engine.runner.states
    assert priced == (3 * states.request_bytes, 5 * states.request_bytes)
    assert states.nbytes == sum(priced) > 0


def test_more_requests_than_states_take_turns(model):
    prompts = {f"r{n}": random_prompt(9 + n, n) for n in range(7)}
    want = {name: generate(model, prompt, NEW_TOKENS) for name, prompt in prompts.items()}
    engine = make_engine(model, max_running_requests=2)
    for _ in range(2):  # states that others left are not seen
        got = run(engine, {name: (p, greedy(NEW_TOKENS)) for name, p in prompts.items()})
        assert {name: tokens_of(deltas) for name, deltas in got.items()} == want


def test_a_cancelled_requests_state_is_another_ones_later(model):
    engine = make_engine(model, max_running_requests=1)
    engine.add("gone", random_prompt(20), greedy(40))
    for _ in range(5):
        engine.step()
    engine.cancel("gone")
    prompt = random_prompt(30, 1)
    got = run(engine, {"next": (prompt, greedy(NEW_TOKENS))})
    assert tokens_of(got["next"]) == generate(model, prompt, NEW_TOKENS)


@pytest.mark.parametrize("running", [4, 8])
def test_choices_go_on_from_copies_of_their_prompts_state(model, running):
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


def test_choices_take_over_the_place_of_a_first_that_left_with_its_prompt(model):
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
    model, at, layer, monkeypatch
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


def test_cuda_graphs_of_a_model_with_states_are_refused(model):
    options = ServeOptions("m", cuda_graph_max_bs=4)
    with pytest.raises(ConfigError, match="linear-attention layers, whose states a graph does not"):
        check_graphs(options, torch.device("cuda"), geometry(model.config.to_dict()))
