"""The cache changes size and format under running requests."""

from dataclasses import replace

import pytest
import torch
from tiny_models import (
    gemma,
    generate,
    greedy,
    llama,
    make_engine,
    random_prompt,
    record_logits,
    run,
    tokens_of,
)

import kvq_codecs
from kvq_attention.errors import UnsupportedError
from kvq_cli.engine.params import RequestRejected, SamplingParams
from kvq_pools import PoolFailed, RebuildFailed, RebuildRejected

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MODELS = [llama, gemma]
PAGE = 4
PROMPTS = {f"r{n}": random_prompt(20 + 3 * n, n) for n in range(8)}
NEW = 24
CACHES = (*kvq_codecs.names(), "k=q8_0,v=q4_0")


def answers(engine, at, what):
    """Tokens of eight streams; `what(engine)` is done before step `at` and repeated every 9."""
    got = {name: [] for name in PROMPTS}
    for name, prompt in PROMPTS.items():
        engine.add(name, prompt, greedy(NEW))
    steps = 0
    while engine.has_work:
        if steps >= at and (steps - at) % 9 == 0:
            what(engine)
            engine.cache.space.check_integrity()
        for name, delta in engine.step():
            got[name] += delta.token_ids
        engine.cache.space.check_integrity()
        steps += 1
    assert not any(tier.pages_used for tier in engine.stats().tiers)
    return got


def wanted(model):
    return {name: generate(model, prompt, NEW) for name, prompt in PROMPTS.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("at", [3, 12])
@pytest.mark.parametrize("num_pages", [17, 40, 400])
def test_eight_streams_never_notice_another_size(make, at, num_pages, device):
    model = make().to(device)
    want = wanted(model)
    engine = make_engine(model, num_pages=110)
    reports = []
    got = answers(engine, at, lambda e: reports.append(e.rebuild(num_tokens=num_pages * PAGE)))
    assert got == want
    first = reports[0]
    assert (first.before.num_tokens, first.after.num_tokens) == (440, num_pages * PAGE)
    assert first.after.nbytes == engine.cache.pool.nbytes
    assert first.requests_kept > 0
    assert (first.requests_requeued > 0) == (num_pages < 100 and at == 12)
    assert engine.stats().tiers[0].pages_total == num_pages


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("cache_type", ["prefix", "none"])
def test_sizes_may_change_in_turns_with_and_without_a_prefix_cache(make, cache_type):
    model = make()
    want = wanted(model)
    sizes = iter([60, 300, 30, 90, 17, 500] * 20)
    engine = make_engine(model, num_pages=110, cache_type=cache_type)
    assert answers(engine, 2, lambda e: e.rebuild(num_tokens=next(sizes) * PAGE)) == want


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("cache", CACHES)
def test_p014_a_pool_allocated_anew_gives_the_same_logits(make, cache, device):
    model = make(head_dim=128).to(device)
    prompt = random_prompt(40)
    calm = make_engine(model, cache=cache)
    want = record_logits(calm)
    run(calm, {"r": (prompt, greedy(12))})
    engine = make_engine(model, cache=cache)
    got = record_logits(engine)
    engine.add("r", prompt, greedy(12))
    while engine.has_work:
        if len(got) in (1, 5, 8):
            report = engine.rebuild(num_tokens=(80 - 4 * len(got)) * PAGE)
            assert (report.requests_kept, report.requests_requeued) == (1, 0)
        engine.step()
    assert len(got) == len(want)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("make", MODELS)
def test_cached_prefixes_survive_another_size(make):
    model = make()
    engine = make_engine(model, num_pages=64)
    prompt = random_prompt(40)
    first = tokens_of(run(engine, {"r": (prompt, greedy(8))})["r"])
    for num_pages in (200, 20):
        report = engine.rebuild(num_tokens=num_pages * PAGE)
        assert report.cached_kept["full"] == 12
        got = run(engine, {"r": (prompt, greedy(8))})["r"]
        assert (tokens_of(got), got[-1].cached_tokens) == (first, 39)


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("at", [0, 3, 12])
def test_another_format_computes_running_requests_again_in_it(make, at):
    model = make()
    prompts = {name: PROMPTS[name] for name in ("r0", "r3", "r7")}
    calm = make_engine(model, cache="q8_0")
    before = {
        n: tokens_of(d)
        for n, d in run(calm, {n: (p, greedy(NEW)) for n, p in prompts.items()}).items()
    }
    engine = make_engine(model, cache="q8_0")
    for name, prompt in prompts.items():
        engine.add(name, prompt, greedy(NEW))
    got = {name: [] for name in prompts}
    for _ in range(at):
        for name, delta in engine.step():
            got[name] += delta.token_ids
    running = engine.stats().running
    assert (running > 0) == (at > 0)
    report = engine.rebuild(cache_dtype="fp32")
    assert (report.requests_kept, report.requests_requeued) == (0, running)
    assert not any(report.cached_kept.values())
    assert (report.before.cache_dtype, report.after.cache_dtype) == ("q8_0", "fp32")
    assert report.after.bytes_per_token == engine.cache.pool.plan.token_bytes
    reached = {name: len(tokens) for name, tokens in got.items()}
    while engine.has_work:
        for name, delta in engine.step():
            got[name] += delta.token_ids
        engine.cache.space.check_integrity()
    for name, prompt in prompts.items():
        n = reached[name]
        # up to there as in the old format, from there on what the lossless cache makes of it
        assert got[name][:n] == before[name][:n]
        assert got[name][n:] == generate(model, prompt + got[name][:n], NEW - n)


@pytest.mark.parametrize("make", MODELS)
def test_another_format_drops_the_prefix_cache(make):
    model = make()
    engine = make_engine(model, cache="q8_0")
    prompt = random_prompt(40)
    run(engine, {"r": (prompt, greedy(4))})
    report = engine.rebuild(cache_dtype="q4_0")
    assert report.cached_dropped["full"] == 11
    got = run(engine, {"r": (prompt, greedy(4))})["r"]
    assert got[-1].cached_tokens == 0
    fresh = run(make_engine(model, cache="q4_0"), {"r": (prompt, greedy(4))})["r"]
    assert tokens_of(got) == tokens_of(fresh)


@pytest.mark.parametrize("make", MODELS)
def test_f43_after_growing_the_rows_beyond_the_old_size_are_used_and_right(make):
    model = make()
    engine = make_engine(model, num_pages=16)
    with pytest.raises(RequestRejected, match="cache of 64 tokens"):
        engine.check(random_prompt(100), greedy(1))
    highest = []
    step = engine.runner.forward
    engine.runner.forward = lambda s: (
        highest.append(max(max(r.pages.tables["full"]) for r, _ in s.extends) if s.extends else 0),
        step(s),
    )[1]
    engine.rebuild(num_tokens=200 * PAGE)
    assert engine.max_model_len == 256  # the model's own
    prompts = {f"r{n}": random_prompt(100, n) for n in range(6)}
    want = {name: generate(model, p, 10) for name, p in prompts.items()}
    got = run(engine, {name: (p, greedy(10)) for name, p in prompts.items()})
    assert {name: tokens_of(d) for name, d in got.items()} == want
    assert max(highest) > 100
    engine.rebuild(num_tokens=30 * PAGE)
    assert engine.max_model_len == 120
    got = run(engine, {name: (p, greedy(10)) for name, p in prompts.items()})
    assert {name: tokens_of(d) for name, d in got.items()} == want


@pytest.mark.parametrize("make", MODELS)
def test_f35_growing_the_pool_does_not_grow_the_step(make):
    engine = make_engine(make(), num_pages=16, max_prefill_tokens=7)
    sizes = []
    forward = engine.runner.forward
    engine.runner.forward = lambda step: (
        sizes.append(sum(n for _, n in step.extends)),
        forward(step),
    )[1]
    run(engine, {"r": (random_prompt(50), greedy(2))})
    engine.rebuild(num_tokens=4000 * PAGE)
    run(engine, {f"r{n}": (random_prompt(200, n), greedy(2)) for n in range(4)})
    assert max(sizes) == 7


# ---- what is refused -----------------------------------------------------------------------------


def contents(engine):
    return {
        tier: [buffer.clone() for buffer in buffers]
        for tier, buffers in engine.cache.pool._buffers.items()
    }


def same(a, b):
    return a.keys() == b.keys() and all(
        torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        for tier in a
        for x, y in zip(a[tier], b[tier], strict=True)
    )


REFUSALS = [
    ({"num_tokens": 442}, "multiple of the page's 4 tokens, got 442; the nearest: 440 and 444"),
    ({"num_tokens": 2}, "at least 8, 2 of the pages of 4 tokens, got 2"),
    ({"num_tokens": 4}, "at least 8, 2 of the pages of 4 tokens, got 4"),
    ({"num_tokens": 0}, "got 0"),
    ({"num_tokens": -4}, "got -4"),
    ({"num_tokens": 4 * 10**15}, "about .* tokens fit"),
    ({"num_tokens": 40}, "up to 40, and 8 that run or wait may need more, up to 65; keep .* 68"),
    ({"num_tokens": 64}, "up to 64, and 1 that run or wait may need more, up to 65; keep .* 68"),
    ({"cache_dtype": "q5_0"}, "q5_0.*q4_0"),
    ({"cache_dtype": "iso3"}, "head_dim 32 is not a multiple of 128"),
    ({"cache_dtype": "fp32", "num_tokens": 442}, "multiple"),
]


@pytest.mark.parametrize(("wish", "words"), REFUSALS)
def test_what_cannot_be_done_is_refused_with_the_numbers_and_nothing_changes(wish, words):
    model = llama()
    want = wanted(model)
    engine = make_engine(model, num_pages=110)

    def refused(engine):
        before, stats = contents(engine), engine.stats()
        with pytest.raises(RebuildRejected, match=words):
            engine.rebuild(**wish)
        assert same(contents(engine), before)
        assert engine.stats() == stats

    got = {name: [] for name in PROMPTS}
    for name, prompt in PROMPTS.items():
        engine.add(name, prompt, greedy(NEW))
    for step in range(10):
        if step in (0, 1, 6):
            refused(engine)
        for name, delta in engine.step():
            got[name] += delta.token_ids
    while engine.has_work:
        for name, delta in engine.step():
            got[name] += delta.token_ids
    assert got == want


def test_two_pages_are_the_fewest_but_for_a_server_started_with_one():
    engine = make_engine(llama(), num_pages=4)
    assert engine.rebuild(num_tokens=2 * PAGE).after.num_tokens == 2 * PAGE
    with pytest.raises(RebuildRejected, match="at least 8"):
        engine.rebuild(num_tokens=PAGE)
    small = make_engine(llama(), num_pages=1)
    assert small.rebuild(cache_dtype="q8_0").after.num_tokens == PAGE
    assert small.rebuild(num_tokens=3 * PAGE).after.num_tokens == 3 * PAGE
    assert small.rebuild(num_tokens=PAGE).after.num_tokens == PAGE
    with pytest.raises(RebuildRejected, match="at least 4, 1 of the pages of 4 tokens, got 0"):
        small.rebuild(num_tokens=0)


def test_a_format_that_no_backend_reads_is_refused(monkeypatch):
    engine = make_engine(llama())

    def choose(backend, **needs):
        raise UnsupportedError(f"reference lacks decode with {needs['formats']}")

    monkeypatch.setattr("kvq_attention.support.choose", choose)
    with pytest.raises(RebuildRejected, match=r"reference lacks decode with .*q4_0"):
        engine.rebuild(cache_dtype="q4_0")
    assert engine.cache.choice.cache_dtype == "fp32"


def test_memory_that_is_not_there_is_refused_with_the_numbers():
    engine = make_engine(llama(), num_pages=64)
    cache, pool = engine.cache, engine.cache.pool
    means = replace(cache._means, free_bytes=lambda: 1000, workspace_bytes=lambda *_: 300)
    cache._means = means
    # what the present cache has may be used: that much and 700 bytes fit, and no page more
    fits = pool.plan.pages_for(pool.nbytes + 700)
    with pytest.raises(RebuildRejected, match=rf"1,000 free and {pool.nbytes:,} of the present"):
        engine.rebuild(num_tokens=(fits + 1) * PAGE)
    engine.rebuild(num_tokens=64 * PAGE)
    cache._means = replace(means, free_bytes=lambda: 10**6)
    run(engine, {"r": (random_prompt(40), greedy(4))})
    cache._means = replace(means, free_bytes=lambda: 10**6, host_free_bytes=lambda: 1000)
    staged = 11 * pool.plan.page_bytes
    with pytest.raises(RebuildRejected, match=rf"{staged:,} bytes of live pages .* 1,000 are free"):
        engine.rebuild(num_tokens=80 * PAGE)
    with pytest.raises(RebuildRejected, match=rf"{staged:,} bytes of live pages"):
        engine.rebuild(cache_dtype="q8_0")  # they are needed should it fail


def test_a_request_without_a_limit_ends_where_the_context_ends_now():
    model = llama()
    endless = SamplingParams(temperature=0.0, ignore_eos=True)
    prompt = random_prompt(20)
    want = generate(model, prompt, 236)
    engine = make_engine(model, num_pages=20)
    engine.add("r", prompt, endless)
    got = []
    for step in range(400):
        if step == 10:
            engine.rebuild(num_tokens=100 * PAGE)
        if step == 30:
            with pytest.raises(RebuildRejected, match=r"up to 48, and 1 .* up to 50; keep .* 52"):
                engine.rebuild(num_tokens=48)
            engine.rebuild(num_tokens=60)
        got += [t for _, delta in engine.step() for t in delta.token_ids]
        if not engine.has_work:
            break
    assert got == want[:40]
    assert engine.stats().requests_finished_total == {"length": 1}


def test_requests_that_can_never_fit_are_refused_by_what_binds():
    engine = make_engine(llama(), num_pages=200)
    with pytest.raises(RequestRejected, match=r"257 .* context of 256 tokens .* a model made for"):
        engine.check(random_prompt(257), greedy(1))
    with pytest.raises(RequestRejected, match=r"200 prompt tokens and 57 to generate exceed"):
        engine.check(random_prompt(200), greedy(57))
    engine.rebuild(num_tokens=80)
    with pytest.raises(RequestRejected, match=r"81 .* cache of 80 tokens .*kvq ctl cache"):
        engine.check(random_prompt(81), SamplingParams())


# ---- what fails ----------------------------------------------------------------------------------


def failing(pool, fails):
    """Make the pool's allocations fail where `fails(n)` says so, n counting from 0."""
    empty, count = pool._empty, iter(range(10**6))

    def allocate(shape, kind):
        if fails(next(count)):
            raise MemoryError("injected")
        return empty(shape, kind)

    pool._empty = allocate
    return lambda: setattr(pool, "_empty", empty)


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("cache", ["fp32", "q8_0"])
@pytest.mark.parametrize(
    "wish", [{"num_tokens": 600}, {"num_tokens": 272}, {"cache_dtype": "q4_0"}]
)
def test_each_allocation_fails_in_turn_and_the_old_cache_serves_on(make, cache, wish):
    model = make()
    calm = make_engine(model, cache=cache, num_pages=110)
    want = answers(calm, 0, lambda engine: None)
    engine = make_engine(model, cache=cache, num_pages=110)
    buffers = sum(len(b) for b in engine.cache.pool._buffers.values())
    turn = iter(range(10**6))

    def fails(engine):
        before, summary = live_contents(engine), engine.stats()
        broken = next(turn) % buffers
        restore = failing(engine.cache.pool, lambda n: n == broken)
        with pytest.raises(RebuildFailed, match="injected"):
            engine.rebuild(**wish)
        restore()
        assert live_contents(engine) == before
        after = engine.stats()
        assert after.last_rebuild.error
        assert after.last_rebuild.after == after.last_rebuild.before
        assert replace(after, last_rebuild=summary.last_rebuild) == summary

    got = {name: [] for name in PROMPTS}
    for name, prompt in PROMPTS.items():
        engine.add(name, prompt, greedy(NEW))
    while engine.has_work:
        fails(engine)
        for name, delta in engine.step():
            got[name] += delta.token_ids
    assert got == want
    assert next(turn) > buffers


def live_contents(engine):
    """Bytes of every page that somebody owns, and of whom."""
    found = {}
    for tier, buffers in engine.cache.pool._buffers.items():
        allocator = engine.cache.space._allocators[tier]
        for page in range(allocator.num_pages):
            if allocator.owners(page):
                found[tier, page] = [
                    bytes(b[:, page].contiguous().view(torch.uint8).numpy()) for b in buffers
                ]
    return found


def test_when_the_way_back_fails_too_the_engine_serves_no_more():
    engine = make_engine(llama())
    engine.add("r", random_prompt(20), greedy(20))
    for _ in range(4):
        engine.step()
    failing(engine.cache.pool, lambda n: n >= 1)
    with pytest.raises(PoolFailed, match="injected"):
        engine.rebuild(num_tokens=400)
    with pytest.raises(PoolFailed):
        engine.step()


@pytest.mark.gpu
@pytest.mark.parametrize("make", MODELS)
def test_a_smaller_pool_gives_device_memory_back(make):
    engine = make_engine(make().to("cuda"), num_pages=300_000)
    run(engine, {"r": (random_prompt(20), greedy(4))})
    big = engine.cache.pool.nbytes
    before = torch.cuda.mem_get_info()[0]
    engine.rebuild(num_tokens=400)
    assert torch.cuda.mem_get_info()[0] - before >= 0.9 * (big - engine.cache.pool.nbytes)
    got = run(engine, {"r": (random_prompt(20), greedy(4))})["r"]
    assert got[-1].cached_tokens == 19
