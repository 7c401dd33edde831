"""A model whose every layer slides: its requests may be longer than its pool."""

from __future__ import annotations

from tiny_models import generate, greedy, make_engine, mistral, run, tokens_of


def test_a_request_longer_than_the_pool_gets_transformers_tokens():
    model = mistral()
    prompt = [1 + 7 * i % 90 for i in range(100)]
    expected = generate(model, prompt, 40)
    assert len(set(expected)) > 5
    engine = make_engine(model, num_pages=12)
    assert [tier.name for tier in engine.cache.pool.plan.tiers] == ["window"]
    assert 12 * 4 < len(prompt) < engine.max_model_len
    found = run(engine, {"a": (prompt, greedy(40))})
    assert tokens_of(found["a"]) == expected
