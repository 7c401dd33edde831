"""With the lossless cache and float32 weights, kvq's tokens are transformers' own."""

import pytest
from prose import token_prompt
from tiny_models import generate, greedy, make_engine, run, tokens_of

LENGTHS = (5, 16, 17, 100, 511, 512, 513, 700, 1024, 1500)
NEW_TOKENS = 16


@pytest.fixture(scope="module", params=["smollm2", "gemma"])
def real(request):
    """A real model, its prompts by length, and what transformers generates."""
    loaded = request.getfixturevalue(request.param)
    prompts = {n: token_prompt(loaded.tokenizer, n, start=n) for n in LENGTHS}
    want = {n: generate(loaded.model, p, NEW_TOKENS) for n, p in prompts.items()}
    return loaded, prompts, want


def engine_over(loaded, chunk, **options):
    return make_engine(
        loaded.model,
        num_pages=512,
        page_tokens=16,
        max_prefill_tokens=chunk,
        max_running_requests=16,
        tokenizer=loaded.tokenizer,
        **options,
    )


def check_batch(real, chunk, lengths):
    loaded, prompts, want = real
    requests = {str(n): (prompts[n], greedy(NEW_TOKENS)) for n in lengths}
    got = run(engine_over(loaded, chunk), requests)
    assert {int(n): tokens_of(d) for n, d in got.items()} == {n: want[n] for n in lengths}


@pytest.mark.parametrize("chunk", [17, 512])
def test_a_batch_of_all_lengths_chunked(real, chunk):
    check_batch(real, chunk, LENGTHS)


def test_chunks_of_a_page(real):
    check_batch(real, 16, [n for n in LENGTHS if n <= 700])


def test_chunks_of_one_token_past_the_window(real):
    check_batch(real, 1, (5, 17, 513))


def test_each_length_alone(real):
    loaded, prompts, want = real
    for n, p in prompts.items():
        got = run(engine_over(loaded, 2048), {"r": (p, greedy(NEW_TOKENS))})
        assert tokens_of(got["r"]) == want[n], n


def test_shared_prefixes_change_no_token(real):
    loaded, prompts, want = real
    base = prompts[1024]
    mixed = {n: base[:n] + prompts[100][:50] for n in (16, 509)}
    wanted = {n: generate(loaded.model, p, NEW_TOKENS) for n, p in mixed.items()}
    engine = engine_over(loaded, 512)
    assert tokens_of(run(engine, {"r": (base, greedy(NEW_TOKENS))})["r"]) == want[1024]
    got = run(engine, {str(n): (p, greedy(NEW_TOKENS)) for n, p in mixed.items()})
    assert {int(n): tokens_of(d) for n, d in got.items()} == wanted
    # the token after the shared ones may be the same by chance
    assert all(n <= d[-1].cached_tokens <= n + 1 for n, d in ((int(n), d) for n, d in got.items()))
    again = run(engine, {"r": (base, greedy(NEW_TOKENS))})["r"]
    assert (tokens_of(again), again[-1].cached_tokens) == (want[1024], 1023)
