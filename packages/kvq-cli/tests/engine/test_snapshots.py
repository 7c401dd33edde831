"""States kept beside cached pages: who begins alike goes on from a copy that never changes."""

from __future__ import annotations

import random

import pytest
import torch
from tiny_families import tiny
from tiny_models import generate, greedy, make_engine, random_prompt, run, tokens_of

from kvq_cli.compose import ServeOptions
from kvq_cli.config import ConfigError, geometry
from kvq_cli.notes import state_notes

pytestmark = pytest.mark.usefixtures("one_thread")

NEW_TOKENS = 12
PAGE = 4


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5"])
def model(request):
    return tiny(request.param)


def ask(engine, prompt, count=NEW_TOKENS, name="r"):
    """A request alone: its tokens, and how many of its prompt's were cached."""
    deltas = run(engine, {name: (prompt, greedy(count))})[name]
    return tokens_of(deltas), deltas[-1].cached_tokens


def snapshots(engine):
    """The bytes of each snapshot that is held, by the pages that lead to it."""
    states, held = engine.runner.states, engine.cache.space._tree.snapshots._of
    slots = {node.key: states.num_requests + found.place for node, found in held.items()}
    return {
        key: tuple(buffer[:, slot].clone() for buffer in (states.inputs, states.matrices))
        for key, slot in slots.items()
    }


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("length", [5, 8, 9, 31, 32, 33, 70])
def test_a_prompt_asked_again_goes_on_from_the_last_end_of_a_page(model, length):
    prompt = random_prompt(length)
    want = generate(model, prompt, NEW_TOKENS)
    engine = make_engine(model)
    assert ask(engine, prompt) == (want, 0)
    assert ask(engine, prompt) == (want, (length - 1) // PAGE * PAGE)


@pytest.mark.parametrize("turns", [4])
def test_the_next_turn_of_a_conversation_computes_nothing_again(model, turns):
    engine = make_engine(model)
    said, computed = random_prompt(21), 0
    for turn in range(turns):
        answer, cached = ask(engine, said)
        assert (answer, cached) == (generate(model, said, NEW_TOKENS), computed)
        computed = len(said) + NEW_TOKENS - 1  # the last one was told and not computed
        said = said + answer + random_prompt(7 + turn, turn)
    assert engine.stats().snapshots.missed_tokens == 0


def test_those_that_begin_alike_share_what_the_second_of_them_left(model):
    """Nobody knows where prompts will part before two of them did."""
    system = random_prompt(41)
    prompts = [system + random_prompt(20 + n, n) for n in range(3)]
    engine = make_engine(model, max_prefill_tokens=256)
    got = [ask(engine, prompt) for prompt in prompts]
    assert [tokens for tokens, _ in got] == [generate(model, p, NEW_TOKENS) for p in prompts]
    assert [cached for _, cached in got] == [0, 0, 40]
    assert engine.stats().snapshots.missed_tokens == 41 + 1  # and what is no whole page


def test_a_long_prompt_leaves_states_on_its_way(model):
    text = random_prompt(64)
    engine = make_engine(model, max_prefill_tokens=16)
    ask(engine, text + random_prompt(30, 1))
    asked = text + random_prompt(30, 2)
    assert ask(engine, asked) == (generate(model, asked, NEW_TOKENS), 64)


def test_prompts_that_share_a_step_leave_states_on_their_way_too(model):
    """What the first leaves of a step's tokens is no whole number of pages."""
    engine = make_engine(model, num_pages=256, max_prefill_tokens=22, state_snapshots=32)
    prompts = {f"r{n}": random_prompt(50 + n, n) for n in range(3)}
    got = run(engine, {name: (p, greedy(NEW_TOKENS)) for name, p in prompts.items()})
    want = {name: generate(model, p, NEW_TOKENS) for name, p in prompts.items()}
    assert {name: tokens_of(deltas) for name, deltas in got.items()} == want
    for prompt in prompts.values():
        _, cached = ask(engine, prompt[:45] + random_prompt(9, 7))
        assert 20 <= cached <= 44


def test_snapshots_stay_as_they_are_while_others_go_on_from_them(model):
    engine, prompt = make_engine(model), random_prompt(30)
    ask(engine, prompt)
    before = snapshots(engine)
    assert len(before) == 3  # on the prompt's way, at its end, and where the answer ended
    for n in range(3):
        engine.add(f"r{n}", prompt, greedy(20), [f"r{n}twin"])
    seen = []
    while engine.has_work:
        engine.step()
        after = snapshots(engine)
        both = before.keys() & after.keys()
        assert all(same(before[key], after[key]) for key in both)
        seen.append(len(both))
    assert seen[0] == 3 and seen[-1] == 2  # a longer answer has taken the shorter one's place
    assert engine.stats().snapshots.hits == 3
    values = list(snapshots(engine).values())
    assert not any(same(a, b) for n, a in enumerate(values) for b in values[:n])


def test_a_request_computes_on_a_copy_and_never_on_a_snapshot(model):
    """Nor do two requests share a state: each begins at the same one and goes elsewhere."""
    engine, prompt = make_engine(model), random_prompt(30)
    ask(engine, prompt)
    endings = [random_prompt(9, n) for n in range(3)]
    asked = {f"r{n}": prompt[:28] + more for n, more in enumerate(endings)}
    got = run(engine, {name: (p, greedy(NEW_TOKENS)) for name, p in asked.items()})
    want = {name: generate(model, p, NEW_TOKENS) for name, p in asked.items()}
    assert {name: tokens_of(deltas) for name, deltas in got.items()} == want
    assert {deltas[-1].cached_tokens for deltas in got.values()} == {28}
    slots = [place.slot for place in engine.runner.states._places.values()]
    assert len({*slots}) == len(slots) and max(slots) < engine.runner.states.num_requests


def test_choices_of_a_cached_prompt(model):
    engine, prompt = make_engine(model), random_prompt(30)
    ask(engine, prompt)
    engine.add("a", prompt, greedy(NEW_TOKENS), ["b", "c"])
    found = {name: [] for name in "abc"}
    while engine.has_work:
        for name, delta in engine.step():
            found[name] += delta.token_ids
            assert delta.cached_tokens == 28
        engine.cache.space.check_integrity()
    assert found["a"] == found["b"] == found["c"] == generate(model, prompt, NEW_TOKENS)


def test_whoever_was_preempted_goes_on_from_where_it_was(model):
    prompts = {f"r{n}": random_prompt(21 + n, n) for n in range(4)}
    want = {name: generate(model, prompt, NEW_TOKENS) for name, prompt in prompts.items()}
    engine = make_engine(model, num_pages=20, max_prefill_tokens=16)
    got = run(engine, {name: (p, greedy(NEW_TOKENS)) for name, p in prompts.items()})
    stats = engine.stats()
    assert {name: tokens_of(deltas) for name, deltas in got.items()} == want
    assert stats.preemptions_total > 0 and stats.snapshots.hits > 0


def test_a_rebuild_keeps_the_snapshots_of_pages_that_it_keeps(model):
    engine, prompt = make_engine(model), random_prompt(30)
    want = generate(model, prompt, NEW_TOKENS)
    assert ask(engine, prompt) == (want, 0)
    engine.rebuild(num_tokens=PAGE * 40)
    assert ask(engine, prompt) == (want, 28)
    engine.rebuild(cache_dtype="bf16")  # rows of another layout, and so no pages
    assert engine.stats().snapshots.held == 0
    assert ask(engine, prompt)[1] == 0


def test_an_aborted_prompt_leaves_what_was_computed_of_it(model):
    engine, prompt = make_engine(model, max_prefill_tokens=16), random_prompt(70)
    engine.add("gone", prompt, greedy(5))
    for _ in range(3):
        engine.step()
    engine.cancel("gone")
    engine.cache.space.check_integrity()
    assert ask(engine, prompt) == (generate(model, prompt, NEW_TOKENS), 48)


def test_snapshots_go_with_their_pages(model):
    engine, prompt = make_engine(model, num_pages=16), random_prompt(30)
    ask(engine, prompt)
    ask(engine, random_prompt(50, 1))  # takes nearly all pages
    engine.cache.space.check_integrity()
    want = generate(model, prompt, NEW_TOKENS)
    assert ask(engine, prompt) == (want, 0)
    assert engine.stats().prefix.evicted_pages > 0


def test_memory_is_bounded_however_much_is_asked(model):
    engine = make_engine(model, num_pages=512, state_snapshots=3)
    before = engine.runner.states.nbytes
    for n in range(12):
        ask(engine, random_prompt(20, n), count=2)
        assert engine.stats().snapshots.held <= 3
    stats = engine.stats().snapshots
    assert (stats.places, stats.held) == (3, 3)
    assert stats.evicted > 12
    assert engine.runner.states.nbytes == before


def test_f45_a_side_call_does_not_drain_the_snapshots_of_conversations(model):
    """Two conversations in turns with short calls between, in fewer places than all would take."""
    engine = make_engine(model, num_pages=512, state_snapshots=6)
    said = {name: random_prompt(100, n) for n, name in enumerate("ab")}
    cached = []
    for turn in range(4):
        for name, tokens in said.items():
            answer, found = ask(engine, tokens)
            cached.append((found, len(tokens)))
            said[name] = tokens + answer + random_prompt(9, turn)
            ask(engine, random_prompt(12, 100 + turn), count=3)
    lacking = [length - found for found, length in cached[2:]]
    assert max(lacking) <= 9 + NEW_TOKENS + PAGE  # what is new of a turn, and part of a page
    stats = engine.stats().snapshots
    assert stats.evicted > 0  # there was not room for all, or this would prove nothing


def test_f45_what_a_pool_that_is_too_small_costs_is_told(model):
    engine = make_engine(model, num_pages=512, state_snapshots=1)
    prompt = random_prompt(100)
    ask(engine, prompt)
    ask(engine, random_prompt(120, 1))
    _, cached = ask(engine, prompt)
    stats = engine.stats().snapshots
    assert cached == 0 and stats.missed_tokens >= 99 and stats.evicted >= 1


def test_without_snapshots_everything_is_computed_whole_and_that_is_said(model):
    shape = geometry(model.config.to_dict())
    options = ServeOptions("m", state_snapshots=0)
    assert "--state-snapshots 0" in state_notes(shape, options)[0]
    assert state_notes(shape, ServeOptions("m")) == ()
    engine, prompt = make_engine(model, state_snapshots=0), random_prompt(30)
    for _ in range(2):
        assert ask(engine, prompt) == (generate(model, prompt, NEW_TOKENS), 0)
    assert engine.runner.states.nbytes == 8 * engine.runner.states.request_bytes


def test_fewer_than_none_are_refused():
    with pytest.raises(ConfigError, match="state_snapshots must be at least 0, got -1"):
        ServeOptions("m", state_snapshots=-1)


@pytest.mark.parametrize("seed", range(3))
def test_a_random_mix_of_all_of_it(model, seed):
    """Turns, choices, cancellations and rebuilds in a small cache: transformers' own tokens."""
    rng = random.Random(seed)
    engine = make_engine(
        model, num_pages=40, max_running_requests=3, max_prefill_tokens=16, state_snapshots=4
    )
    stems = [random_prompt(40, n) for n in range(2)]
    prompts, found = {}, {}
    for n in range(24):
        names = [f"{n}.{choice}" for choice in range(rng.randint(1, 2))]
        prompt = rng.choice(stems)[: rng.randint(1, 40)] + random_prompt(rng.randint(1, 20), n % 5)
        prompts |= dict.fromkeys(names, prompt)
        found |= {name: [] for name in names}
        engine.add(names[0], prompt, greedy(NEW_TOKENS), names[1:])
        for _ in range(rng.randint(0, 12)):
            if engine.has_work:
                for name, delta in engine.step():
                    found[name] += delta.token_ids
                engine.cache.space.check_integrity()
        if rng.random() < 0.3:
            engine.cancel(rng.choice(sorted(prompts)))
        if rng.random() < 0.2:
            engine.rebuild(num_tokens=PAGE * rng.choice([30, 40, 50]))
    while engine.has_work:
        for name, delta in engine.step():
            found[name] += delta.token_ids
    engine.cache.space.check_integrity()
    want = {name: generate(model, prompt, NEW_TOKENS) for name, prompt in prompts.items()}
    assert {n: tokens for n, tokens in found.items() if tokens != want[n][: len(tokens)]} == {}
    assert sum(len(tokens) == NEW_TOKENS for tokens in found.values()) > len(found) // 2
    assert engine.stats().snapshots.hits > 5
