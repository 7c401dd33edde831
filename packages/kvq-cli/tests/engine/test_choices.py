"""Several answers to one prompt: computed once, on pages that they share."""

import pytest
from tiny_models import gemma, generate, greedy, llama, make_engine, random_prompt, run, tokens_of

from kvq_cli.engine.params import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = random_prompt(22)
NAMES = ["a", "b", "c", "d"]


def finish(engine, seen=None):
    """Step to the end; tokens by request."""
    out = {} if seen is None else seen
    while engine.has_work:
        for name, delta in engine.step():
            out.setdefault(name, []).append(delta)
        engine.cache.space.check_integrity()
    return {name: tokens_of(deltas) for name, deltas in out.items()}


def drawn(count, seed=7):
    return SamplingParams(max_tokens=count, seed=seed, temperature=1.5, ignore_eos=True)


def computed_tokens(engine):
    """How many tokens each step computes, from now on."""
    counts, forward = [], engine.runner.forward

    def counted(step):
        counts.append(sum(tokens for _, tokens in step.work))
        return forward(step)

    engine.runner.forward = counted
    return counts


@pytest.mark.parametrize("make", [llama, gemma])
@pytest.mark.parametrize("cache_type", ["prefix", "none"])
def test_choices_share_the_prompts_pages_and_compute_it_once(make, cache_type):
    model = make()
    engine = make_engine(
        model, attention_backend="reference", cache_type=cache_type, max_prefill_tokens=8
    )
    counts = computed_tokens(engine)
    engine.add("a", PROMPT, greedy(12), NAMES[1:])
    for _ in range(3):
        engine.step()
    running = engine.scheduler.running
    assert [request.request_id for request in running] == NAMES
    whole = len(PROMPT) // 4
    tables = [request.pages.tables["full"] for request in running]
    assert all(table[:whole] == tables[0][:whole] for table in tables)
    assert len({table[whole] for table in tables}) == 4  # the half page is everyone's own
    answers = finish(engine)
    want = generate(model, PROMPT, 12)
    assert all(want[-len(answer) :] == answer for answer in answers.values())
    assert sum(counts) == len(PROMPT) + 4 * 11
    assert not any(tier.pages_used for tier in engine.stats().tiers)
    assert engine.stats().prompt_tokens_total == len(PROMPT)


def test_choices_draw_for_themselves_and_the_first_as_it_would_alone():
    engine = make_engine(llama(), attention_backend="reference")
    engine.add("a", PROMPT, drawn(10), NAMES[1:])
    together = finish(engine)
    assert len(set(map(tuple, together.values()))) == 4
    alone = run(make_engine(llama(), attention_backend="reference"), {"a": (PROMPT, drawn(10))})
    assert together["a"] == tokens_of(alone["a"])


@pytest.mark.parametrize("limits", [{"max_running_requests": 2}, {"num_pages": 12}])
def test_choices_without_room_wait_and_say_the_same(limits):
    engine = make_engine(llama(), attention_backend="reference")
    engine.add("a", PROMPT, drawn(16), NAMES[1:])
    want = finish(engine)
    cramped = make_engine(llama(), attention_backend="reference", **limits)
    cramped.add("a", PROMPT, drawn(16), NAMES[1:])
    cramped.add("late", PROMPT[::-1], greedy(4))
    got = finish(cramped)
    assert {name: got[name] for name in NAMES} == want
    assert got["late"] == generate(llama(), PROMPT[::-1], 4)


def test_choices_wait_before_those_who_came_later():
    engine = make_engine(llama(), attention_backend="reference", max_running_requests=2)
    engine.add("a", PROMPT, greedy(3), ["b", "c"])
    engine.add("late", PROMPT, greedy(3))
    order = []
    while engine.has_work:
        order += [name for name, delta in engine.step() if delta.finish_reason]
    assert order == ["a", "b", "c", "late"]


@pytest.mark.parametrize("gone", [["a"], ["b"], ["a", "c"], NAMES])
def test_a_choice_cancelled_before_it_began_leaves_the_others(gone):
    engine = make_engine(llama(), attention_backend="reference", max_prefill_tokens=8)
    engine.add("a", PROMPT, drawn(6), NAMES[1:])
    assert engine.stats().waiting == 4
    engine.step()
    assert (engine.stats().running, engine.stats().waiting) == (1, 3)
    for name in gone:
        engine.cancel(name)
    whole = make_engine(llama(), attention_backend="reference")
    whole.add("a", PROMPT, drawn(6), NAMES[1:])
    want = finish(whole)
    assert finish(engine) == {name: want[name] for name in NAMES if name not in gone}
    assert engine.stats().requests_finished_total.get("abort") == len(gone)
