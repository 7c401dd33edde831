"""A model whose every layer slides: its requests may be longer than its pool."""

from __future__ import annotations

import pytest
import torch
from tiny_models import VOCABULARY, generate, greedy, make_engine, run, tokens_of
from transformers import MistralConfig, MistralForCausalLM


@pytest.fixture(scope="module")
def model() -> MistralForCausalLM:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        sliding_window=24,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
    )
    return MistralForCausalLM(config).eval()


def test_a_request_longer_than_the_pool_gets_transformers_tokens(model):
    prompt = [1 + 7 * i % 90 for i in range(100)]
    expected = generate(model, prompt, 40)
    assert len(set(expected)) > 5
    engine = make_engine(model, num_pages=12)
    assert [tier.name for tier in engine.cache.pool.plan.tiers] == ["window"]
    assert 12 * 4 < len(prompt) < engine.max_model_len
    found = run(engine, {"a": (prompt, greedy(40))})
    assert tokens_of(found["a"]) == expected
