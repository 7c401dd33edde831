import random

import pytest
from tiny_models import (
    VOCABULARY,
    gemma,
    generate,
    greedy,
    llama,
    make_engine,
    run,
    tokens_of,
)
from tiny_models import random_prompt as prompt

from kvq_cli.engine.params import RequestRejected, SamplingParams


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("make", [llama, gemma])
@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_the_lossless_cache_gives_transformers_own_tokens(make, chunk, device):
    model = make().to(device)
    prompts = {f"r{n}": prompt(n) for n in (1, 5, 23, 24, 25, 60)}
    want = {name: generate(model, p, 20) for name, p in prompts.items()}
    engine = make_engine(model, max_prefill_tokens=chunk, num_pages=256)
    got = run(engine, {name: (p, greedy(20)) for name, p in prompts.items()})
    assert {name: tokens_of(deltas) for name, deltas in got.items()} == want


@pytest.mark.parametrize("make", [llama, gemma])
def test_requests_that_come_later_change_nothing(make):
    model = make()
    want = generate(model, prompt(30), 30)
    engine = make_engine(model)
    engine.add("first", prompt(30), greedy(30))
    got = []
    for step in range(100):
        if step % 5 == 0 and step < 30:
            engine.add(f"late{step}", prompt(10 + step), greedy(10))
        got += [d for name, d in engine.step() if name == "first"]
        engine.cache.space.check_integrity()
        if not engine.has_work:
            break
    assert tokens_of(got) == want


@pytest.mark.parametrize("make", [llama, gemma])
def test_when_pages_run_out_requests_are_computed_again_and_lose_nothing(make):
    model = make()
    prompts = {f"r{n}": prompt(20, n) for n in range(6)}
    want = {name: generate(model, p, 40) for name, p in prompts.items()}
    engine = make_engine(model, num_pages=30)  # 120 slots for 6 × 60 tokens
    got = run(engine, {name: (p, greedy(40)) for name, p in prompts.items()})
    assert {name: tokens_of(deltas) for name, deltas in got.items()} == want
    stats = engine.stats()
    assert not any(tier.pages_used for tier in stats.tiers)
    assert stats.generation_tokens_total == 240


def test_one_request_may_fill_the_whole_cache():
    engine = make_engine(llama(), num_pages=8)
    got = run(engine, {"r": (prompt(20), greedy(12))})
    assert len(tokens_of(got["r"])) == 12


@pytest.mark.parametrize(("length", "count"), [(32, 1), (33, None), (20, 13), (1, 32)])
def test_a_request_that_can_never_fit_is_refused_with_the_numbers(length, count):
    engine = make_engine(llama(), num_pages=8)
    params = SamplingParams(max_tokens=count, temperature=0.0)
    words = rf"^{length} prompt token{'s' * (length > 1)}( and|) .*32 tokens"
    with pytest.raises(RequestRejected, match=words):
        engine.add("r", prompt(length), params)
    assert not engine.has_work


@pytest.mark.parametrize(
    ("shorter", "cure"), [(1, "with a larger --max-model-len"), (0, "made for more than .* posit")]
)
def test_a_longer_context_is_advised_where_it_can_be_had(shorter, cure):
    model = llama()
    context = model.config.max_position_embeddings - shorter
    engine = make_engine(model, num_pages=context, max_model_len=context)
    with pytest.raises(RequestRejected, match=cure):
        engine.add("r", prompt(5), SamplingParams(max_tokens=context))


def test_tokens_outside_the_vocabulary_are_refused():
    engine = make_engine(llama())
    for bad in (-1, VOCABULARY):
        with pytest.raises(RequestRejected, match=f"token id {bad} .* {VOCABULARY}"):
            engine.add("r", [1, bad], greedy(1))


def test_cancelling_frees_pages_at_once_wherever_the_request_is():
    engine = make_engine(llama(), num_pages=32, max_running_requests=2)
    for name in ("decoding", "prefilling", "waiting"):
        engine.add(name, prompt(40), greedy(40))
    for _ in range(4):
        engine.step()
    for name in ("decoding", "waiting", "prefilling", "prefilling", "unknown"):
        engine.cancel(name)
        engine.cache.space.check_integrity()
    stats = engine.stats()
    assert not any(tier.pages_used for tier in stats.tiers)
    assert not engine.has_work
    assert stats.requests_finished_total == {"abort": 3}


def test_generation_ends_at_end_of_sequence_unless_told_otherwise():
    model = llama()
    # the end-of-sequence id is 0: find a prompt whose greedy answer reaches it
    for seed in range(200):
        want = generate(model, prompt(6, seed), 40)
        if 0 in want[1:]:
            break
    cut = want.index(0)
    params = SamplingParams(max_tokens=40, temperature=0.0)
    got = run(make_engine(model), {"r": (prompt(6, seed), params)})["r"]
    assert tokens_of(got) == want[: cut + 1]
    assert got[-1].finish_reason == "stop"
    got = run(make_engine(model), {"r": (prompt(6, seed), greedy(40))})["r"]
    assert tokens_of(got) == want
    assert got[-1].finish_reason == "length"


def test_a_stop_string_ends_generation_and_is_not_shown():
    model = llama()
    want = generate(model, prompt(6), 30)
    text = "".join(chr(32 + t) for t in want)
    got = run(make_engine(model), {"r": (prompt(6), greedy(30, stop=(text[10:13],)))})["r"]
    assert "".join(d.text for d in got) == text[: text.index(text[10:13])]
    assert got[-1].finish_reason == "stop"
    assert all(d.finish_reason is None for d in got[:-1])


def test_a_seeded_request_draws_the_same_tokens_in_any_company():
    model = llama()
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=11, ignore_eos=True)
    alone = run(make_engine(model), {"r": (prompt(9), params)})["r"]
    company = {f"x{n}": (prompt(9 + n), SamplingParams(max_tokens=20)) for n in range(4)}
    together = run(make_engine(model), {**company, "r": (prompt(9), params)})["r"]
    assert tokens_of(alone) == tokens_of(together)


@pytest.mark.parametrize("cache", ["q8_0", "q4_0", "k=q8_0,v=q4_0", "fp8", "nvfp4"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_preempted_request_of_a_packed_cache_ends_with_all_its_tokens(cache, device):
    engine = make_engine(gemma().to(device), cache=cache, num_pages=30)
    got = run(engine, {f"r{n}": (prompt(20, n), greedy(40)) for n in range(6)})
    assert {len(tokens_of(d)) for d in got.values()} == {40}


def test_random_arrivals_and_cancellations_keep_every_page_accounted_for():
    rng = random.Random(5)
    engine = make_engine(gemma(), cache="q8_0", num_pages=40, max_running_requests=4)
    alive: list[str] = []
    for step in range(250):
        if rng.random() < 0.3:
            name = f"r{step}"
            engine.add(name, prompt(rng.randrange(1, 100), step), greedy(rng.randrange(1, 40)))
            alive.append(name)
        if alive and rng.random() < 0.1:
            engine.cancel(alive.pop(rng.randrange(len(alive))))
        engine.step()
        engine.cache.space.check_integrity()
    while engine.has_work:
        engine.step()
    stats = engine.stats()
    assert not any(tier.pages_used for tier in stats.tiers)
