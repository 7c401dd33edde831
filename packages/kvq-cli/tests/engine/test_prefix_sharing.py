"""Requests that begin alike share pages, and nobody can tell but by the time it takes."""

import pytest
import torch
from engine_tolerances import PACKED_LOGITS
from tiny_models import (
    VOCABULARY,
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

PAGE = 4
FIRST = random_prompt(40)
CACHES = (*kvq_codecs.names(), "k=q8_0,v=q4_0")


def diverging(shared, length=50):
    """A prompt that has exactly `shared` tokens in common with FIRST."""
    other = random_prompt(length, seed=shared)[shared:]
    if shared < len(FIRST):
        other[0] = FIRST[shared] % (VOCABULARY - 1) + 1
    return FIRST[:shared] + other


def roomy(model, **options):
    """An engine that evicts nothing; the window tier's size follows from the requests at once."""
    return make_engine(model, num_pages=512, max_running_requests=64, **options)


def cached(deltas):
    return deltas[-1].cached_tokens


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("make", [llama, gemma])
@pytest.mark.parametrize("chunk", [7, 64])
def test_hits_of_any_length_give_transformers_own_tokens(make, chunk, device):
    model = make().to(device)
    prompts = {n: diverging(n) for n in (1, 3, 4, 8, 13, 24, 39, 40)}
    want = {n: generate(model, p, 12) for n, p in prompts.items()}
    first = generate(model, FIRST, 12)
    engine = roomy(model, max_prefill_tokens=chunk)
    assert tokens_of(run(engine, {"r": (FIRST, greedy(12))})["r"]) == first
    for n, prompt in prompts.items():
        got = run(engine, {"r": (prompt, greedy(12))})["r"]
        assert tokens_of(got) == want[n], n
        assert cached(got) == n
    again = run(engine, {"r": (FIRST, greedy(12))})["r"]  # its pages are as they were
    assert (tokens_of(again), cached(again)) == (first, len(FIRST) - 1)


@pytest.mark.parametrize("make", [llama, gemma])
def test_a_conversation_finds_its_own_answers(make):
    model = make()
    engine = roomy(model)
    turns = FIRST[:10]
    for turn in range(4):
        want = generate(model, turns, 9)
        got = run(engine, {"r": (turns, greedy(9))})["r"]
        assert tokens_of(got) == want
        # the last token of an answer was never computed
        assert cached(got) == (len(turns) - 6 if turn else 0)
        turns = turns + want + random_prompt(5, turn)


@pytest.mark.parametrize("make", [llama, gemma])
def test_requests_that_share_diverge_at_the_same_time(make):
    model = make()
    prompts = {f"r{n}": diverging(n) for n in (8, 10, 13, 30, 39)}
    want = {name: generate(model, p, 20) for name, p in prompts.items()}
    engine = roomy(model)
    run(engine, {"r": (FIRST, greedy(1))})
    got = run(engine, {name: (p, greedy(20)) for name, p in prompts.items()})
    assert {name: tokens_of(d) for name, d in got.items()} == want
    assert {name: cached(d) for name, d in got.items()} == {f"r{n}": n for n in (8, 10, 13, 30, 39)}


@pytest.mark.parametrize("make", [llama, gemma])
def test_a_request_shares_with_one_that_still_runs(make):
    model = make()
    prompt = diverging(32)
    want = generate(model, prompt, 20)
    engine = roomy(model)
    engine.add("first", FIRST, greedy(30))
    for _ in range(5):
        engine.step()
    got = run(engine, {"first": (FIRST[:1], greedy(1)), "late": (prompt, greedy(20))})
    assert (tokens_of(got["late"]), cached(got["late"])) == (want, 32)


@pytest.mark.parametrize("make", [llama, gemma])
def test_without_a_prefix_cache_tokens_are_the_same_and_nothing_is_kept(make):
    model = make()
    engine = make_engine(model, cache_type="none")
    for _ in range(2):
        got = run(engine, {"r": (FIRST, greedy(12))})["r"]
        assert (tokens_of(got), cached(got)) == (generate(model, FIRST, 12), 0)
    stats = engine.stats()
    assert stats.prefix.hit_tokens == 0
    assert all(tier.pages_free == tier.pages_total for tier in stats.tiers)


@pytest.mark.parametrize("cache_type", ["prefix", "none"])
def test_stats_count_a_request_once_however_often_it_loses_its_pages(cache_type):
    engine = make_engine(llama(), num_pages=64, cache_type=cache_type)
    engine.add("r", FIRST, greedy(8))
    times = 0
    while engine.has_work:
        engine.step()
        if engine.scheduler.running and times < 3:
            engine.scheduler._preempt(engine.scheduler.running[0])
            times += 1
    assert times == 3
    prefix = engine.stats().prefix
    assert (prefix.lookups, prefix.queried_tokens, prefix.hit_tokens) == (1, len(FIRST), 0)


def test_stats_count_what_was_asked_and_found():
    engine = make_engine(llama(), num_pages=64)
    run(engine, {"a": (FIRST, greedy(4))})
    run(engine, {"b": (diverging(13), greedy(4))})
    stats = engine.stats()
    assert stats.prefix.lookups == 2
    assert (stats.prefix.queried_tokens, stats.prefix.hit_tokens) == (90, 13)
    [tier] = stats.tiers
    assert tier.pages_used == 0
    assert tier.pages_free + tier.pages_cached == tier.pages_total
    # 43 + 53 computed tokens, of which 12 lie in shared whole pages
    assert tier.pages_cached == 11 + 14 - 3


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("make", [llama, gemma])
@pytest.mark.parametrize("cut", [12, 13])
@pytest.mark.parametrize("cache", CACHES)
def test_p010_prefix_caching_a_hit_is_bit_for_bit_a_cold_run_cut_there(make, cut, cache, device):
    model = make(head_dim=128).to(device)
    prompt = FIRST[: 2 * cut - 2]
    options = {"cache": cache, "max_prefill_tokens": cut}
    cold = make_engine(model, cache_type="none", **options)
    want = record_logits(cold)
    assert cached(run(cold, {"r": (prompt, greedy(8))})["r"]) == 0
    warm = make_engine(model, **options)
    run(warm, {"r": (prompt[:cut], greedy(1))})
    got = record_logits(warm)
    assert cached(run(warm, {"r": (prompt, greedy(8))})["r"]) == cut
    assert len(got) == len(want) - 1  # the first chunk was not computed
    assert all(torch.equal(a, b) for a, b in zip(got, want[1:], strict=True))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("make", [llama, gemma])
@pytest.mark.parametrize("cache", ["fp8_e4m3", "q8_0", "k=q8_0,v=q6_0"])
def test_p040_a_prefix_hit_has_the_scales_of_each_layer(cache, make, device):
    """Values of one layer are 32 times as large as usual, of the next as small, and so on."""
    model = make(head_dim=128).to(device)
    for n, layer in enumerate(model.model.layers):
        layer.self_attn.v_proj.weight.data *= 32.0 ** (-1) ** n
        layer.self_attn.o_proj.weight.data *= 32.0 ** -((-1) ** n)
    cut, prompt = 24, FIRST[:36]
    cold = make_engine(model, cache=cache, max_prefill_tokens=cut, cache_type="none")
    want = record_logits(cold)
    run(cold, {"r": (prompt, greedy(4))})
    whole = make_engine(model, cache=cache, max_prefill_tokens=64, cache_type="none")
    fresh = record_logits(whole)
    run(whole, {"r": (prompt, greedy(1))})
    warm = make_engine(model, cache=cache, max_prefill_tokens=64)
    run(warm, {"r": (prompt[:cut], greedy(1))})
    got = record_logits(warm)
    assert cached(run(warm, {"r": (prompt, greedy(4))})["r"]) == cut
    assert all(torch.equal(a, b) for a, b in zip(got, want[1:], strict=True))
    assert float((got[0] - fresh[0]).norm() / fresh[0].norm()) < PACKED_LOGITS


@pytest.mark.parametrize("cache", ["fp32", "q4_0", "k=q8_0,v=nvfp4"])
@pytest.mark.parametrize("make", [llama, gemma])
def test_a_preempted_request_that_lost_nothing_goes_on_as_if_undisturbed(make, cache):
    model = make()
    calm = make_engine(model, cache=cache)
    want = record_logits(calm)
    run(calm, {"r": (FIRST, greedy(20))})
    engine = make_engine(model, cache=cache)
    got = record_logits(engine)
    engine.add("r", FIRST, greedy(20))
    while engine.has_work:
        if len(got) in (5, 9, 14) and engine.scheduler.running:
            engine.scheduler._preempt(engine.scheduler.running[0])
        engine.step()
        engine.cache.space.check_integrity()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("cache_type", ["prefix", "none"])
def test_f31_whole_pages_are_admitted_the_second_request_stays_queued(cache_type):
    engine = make_engine(llama(), page_tokens=128, num_pages=1, cache_type=cache_type)
    for name in ("first", "second"):
        engine.add(name, [5, 6], greedy(3))
    seen = []
    while engine.has_work:
        names = [name for name, _ in engine.step()]
        seen += names
        if "second" not in names and engine.has_work:
            assert (engine.stats().running, engine.stats().waiting) in ((1, 1), (0, 1))
        engine.cache.space.check_integrity()
    assert seen == ["first"] * 3 + ["second"] * 3


def test_a_request_that_waits_is_looked_up_again_only_when_pages_come_or_go():
    engine = make_engine(llama(), num_pages=30)
    looked_up = []
    lookup = engine.cache.space.lookup
    engine.cache.space.lookup = lambda *given: looked_up.append(len(given[0])) or lookup(*given)
    run(engine, {"a": (FIRST, greedy(60)), "waits": (random_prompt(90), greedy(4))})
    # 62 steps, in 15 of which the first one takes a page, and the second one's own admission
    assert looked_up.count(90) < 20


@pytest.mark.parametrize("cache", ["fp32", "q8_0"])
@pytest.mark.parametrize("make", [llama, gemma])
def test_f53_a_cached_prompt_sent_again_to_a_full_pool_is_a_fresh_run(make, cache):
    model = make()
    fresh = roomy(model, cache=cache)
    first = tokens_of(run(fresh, {"r": (FIRST, greedy(8))})["r"])
    want = record_logits(fresh)
    again = run(fresh, {"r": (FIRST, greedy(8))})["r"]
    assert tokens_of(again) == first or cache != "fp32"
    engine = make_engine(model, cache=cache, num_pages=36)
    got = record_logits(engine)
    run(engine, {"r": (FIRST, greedy(8))})
    full = 0
    for n in range(12):
        engine.add("other", random_prompt(60, n), greedy(6))
        while engine.has_work:
            engine.step()
            full += engine.stats().tiers[0].pages_free == 0
        del got[:]
        found = run(engine, {"r": (FIRST, greedy(8))})["r"]
        assert cached(found) == len(FIRST) - 1
        assert tokens_of(found) == tokens_of(again)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert engine.stats().prefix.evicted_pages > 100
    assert full > 12


def pages_nobody_has(engine, tier):
    allocator = engine.cache.space._allocators[tier]
    return [page for page in range(allocator.num_pages) if not allocator.owners(page)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("poison", [0x7F, 0xFF, float("nan")])
@pytest.mark.parametrize("cache", ["fp32", "q8_0", "nvfp4"])
@pytest.mark.parametrize("make", [llama, gemma])
def test_whatever_lies_in_free_pages_changes_no_token(make, cache, poison, device):
    model = make().to(device)
    requests = {f"r{n}": (diverging(5 * n, 30 + n), greedy(25)) for n in range(6)}

    def answers(poisoned):
        engine = make_engine(model, cache=cache, num_pages=40)
        pool = engine.cache.pool
        got = {name: [] for name in requests}
        for name, (prompt, params) in requests.items():
            engine.add(name, prompt, params)
        while engine.has_work:
            for tier in pool.plan.tiers if poisoned else ():
                pages = [*pages_nobody_has(engine, tier.name), pool.padding_page(tier.name)]
                for buffer in pool._buffers[tier.name]:
                    for page in pages:
                        if isinstance(poison, int):
                            buffer[:, page].view(torch.uint8).fill_(poison)
                        elif buffer.dtype.is_floating_point:
                            buffer[:, page] = poison
                        else:
                            buffer[:, page].view(torch.uint8).fill_(0xFF)
            for name, delta in engine.step():
                got[name] += delta.token_ids
        return got

    assert answers(poisoned=True) == answers(poisoned=False)
