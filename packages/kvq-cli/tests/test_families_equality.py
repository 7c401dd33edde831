"""Each family that is served, with a lossless cache: transformers' own tokens, however computed."""

from __future__ import annotations

import pytest
import torch
from tiny_families import FAMILIES, tiny
from tiny_models import generate, greedy, make_engine, random_prompt, run, tokens_of

from kvq_cli.config import SERVED

LENGTHS = (5, 16, 17, 40, 530)
SHORT = LENGTHS[:-1]
NEW_TOKENS = 10


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Models as small as these gain nothing from a second, and lose much where cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    """A model, its prompts by length, and what transformers generates."""
    model = tiny(request.param)
    prompts = {n: random_prompt(n) for n in LENGTHS}
    want = {n: generate(model, prompt, NEW_TOKENS) for n, prompt in prompts.items()}
    assert len({token for tokens in want.values() for token in tokens}) > 12
    return model, prompts, want


def engine_over(family, **options):
    return make_engine(family[0], page_tokens=16, **{"num_pages": 128, **options})


def answers(engine, prompts):
    got = run(engine, {str(n): (p, greedy(NEW_TOKENS)) for n, p in prompts.items()})
    return {int(n): tokens_of(deltas) for n, deltas in got.items()}


def test_every_family_that_is_served_is_here():
    assert {model_type for model_type, _ in FAMILIES.values()} == set(SERVED)


@pytest.mark.parametrize("chunk", [1, 16, 17, 512])
def test_batched_in_chunks(family, chunk):
    _, prompts, want = family
    asked = {n: prompts[n] for n in (LENGTHS if chunk > 1 else SHORT)}
    got = answers(engine_over(family, max_prefill_tokens=chunk), asked)
    assert got == {n: want[n] for n in asked}


def test_alone_then_from_the_prefix_cache(family):
    _, prompts, want = family
    engine = engine_over(family, max_prefill_tokens=512)
    for n in SHORT:
        assert answers(engine, {n: prompts[n]}) == {n: want[n]}
    again = run(engine, {"r": (prompts[40], greedy(NEW_TOKENS))})["r"]
    kept = 32 if engine.cache.space.num_snapshots else 39  # a state is kept at the end of a page
    assert (tokens_of(again), again[-1].cached_tokens) == (want[40], kept)


def test_preempted_and_rebuilt(family):
    _, prompts, want = family
    engine = engine_over(family, max_prefill_tokens=16, num_pages=8)  # 9 hold all to their ends
    got = {n: [] for n in SHORT}
    for n in SHORT:
        engine.add(str(n), prompts[n], greedy(NEW_TOKENS))
    steps, requeued = 0, 0
    while engine.has_work:
        steps += 1
        if steps % 5 == 0:
            pages = 4 + 4 * (steps % 2)  # the longest request alone fills four
            requeued += engine.rebuild(num_tokens=16 * pages).requests_requeued
        for name, delta in engine.step():
            got[int(name)] += delta.token_ids
    assert got == {n: want[n] for n in SHORT}
    assert requeued > 0
