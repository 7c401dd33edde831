"""Random arrivals, departures, preemptions, hits and rebuilds, all at once."""

import random

import pytest
from tiny_models import gemma, generate, greedy, llama, make_engine, random_prompt

from kvq_cli.engine.params import RequestRejected
from kvq_pools import RebuildFailed, RebuildRejected

PAGE = 4
# a few beginnings that many prompts share, cut anywhere
STEMS = [random_prompt(60, seed) for seed in range(3)]


def some_prompt(rng):
    stem = rng.choice(STEMS)[: rng.randrange(0, 60)]
    return stem + random_prompt(rng.randrange(1, 12), rng.randrange(20))


def storm(engine, seed, steps, formats):
    """Random operations; integrity after each. Returns prompts and tokens of what finished."""
    rng = random.Random(seed)
    prompts, got, done, events = {}, {}, {}, set()
    space, pool = engine.cache.space, engine.cache.pool
    empty = pool._empty
    for step in range(steps):
        if rng.random() < 0.4:
            name, prompt = f"r{step}", some_prompt(rng)
            try:
                engine.add(name, prompt, greedy(rng.randrange(1, 25)))
                prompts[name], got[name] = prompt, []
            except RequestRejected:
                events.add("refused")
        if prompts and rng.random() < 0.1:
            gone = rng.choice(list(prompts))
            engine.cancel(gone)
            del prompts[gone]
            events.add("cancelled")
        if rng.random() < 0.1:
            num_tokens = rng.randrange(12, 60) * PAGE
            dtype = rng.choice(formats) if rng.random() < 0.3 else None
            broken = rng.randrange(6) if rng.random() < 0.3 else None
            calls = iter(range(100))

            def allocate(shape, kind, broken=broken, calls=calls):
                if next(calls) == broken:
                    raise MemoryError("injected")
                return empty(shape, kind)

            pool._empty = allocate
            try:
                report = engine.rebuild(num_tokens, dtype)
                events.add("requeued" if report.requests_requeued else "rebuilt")
            except RebuildRejected:
                events.add("rejected")
            except RebuildFailed:
                events.add("failed")
            pool._empty = empty
            space.check_integrity()
        waiting = engine.stats().waiting
        for name, delta in engine.step():
            if name in got:
                got[name] += delta.token_ids
            if delta.finish_reason and prompts.get(name):
                done[name] = prompts.pop(name), got[name]
            if delta.cached_tokens:
                events.add("hit")
        if engine.stats().waiting > waiting:
            events.add("preempted")
        space.check_integrity()
    while engine.has_work:
        for name, delta in engine.step():
            got[name] += delta.token_ids
            if delta.finish_reason:
                done[name] = prompts.pop(name), got[name]
        space.check_integrity()
    assert not any(tier.pages_used for tier in engine.stats().tiers)
    space.drop_cached()
    assert all(tier.pages_free == tier.pages_total for tier in engine.stats().tiers)
    return done, events


@pytest.mark.parametrize("make", [llama, gemma])
@pytest.mark.parametrize("seed", range(2))
def test_whatever_happens_to_the_cache_every_answer_is_transformers_own(make, seed):
    model = make()
    engine = make_engine(model, num_pages=30, max_running_requests=5)
    done, events = storm(engine, seed, 200, ["fp32"])
    assert len(done) > 30
    for prompt, tokens in done.values():
        assert tokens == generate(model, prompt, len(tokens))
    assert events >= {"cancelled", "requeued", "rebuilt", "failed", "hit", "preempted"}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("make", [llama, gemma])
@pytest.mark.parametrize("seed", range(2))
def test_no_page_is_lost_while_formats_change_too(make, seed, device):
    engine = make_engine(make().to(device), cache="q8_0", num_pages=30, max_running_requests=5)
    done, _ = storm(engine, 10 + seed, 200, ["q8_0", "q4_0", "k=q8_0,v=nvfp4", "bf16"])
    assert len(done) > 30
    assert all(tokens for _, tokens in done.values())
