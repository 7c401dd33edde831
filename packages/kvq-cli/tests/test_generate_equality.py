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


@pytest.mark.parametrize("chunk", [16, 17, 512])
def test_a_batch_of_all_lengths_chunked(real, chunk):
    loaded, prompts, want = real
    engine = engine_over(loaded, chunk)
    got = run(engine, {str(n): (p, greedy(NEW_TOKENS)) for n, p in prompts.items()})
    assert {int(n): tokens_of(deltas) for n, deltas in got.items()} == want


def test_each_length_alone(real):
    loaded, prompts, want = real
    for n, p in prompts.items():
        got = run(engine_over(loaded, 2048), {"r": (p, greedy(NEW_TOKENS))})
        assert tokens_of(got["r"]) == want[n], n


def test_chunks_of_one_token(real):
    loaded, prompts, want = real
    some = {n: prompts[n] for n in (5, 17, 700)}
    got = run(engine_over(loaded, 1), {str(n): (p, greedy(NEW_TOKENS)) for n, p in some.items()})
    assert {int(n): tokens_of(d) for n, d in got.items()} == {n: want[n] for n in some}
