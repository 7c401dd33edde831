"""Weights that a CPU computes with, however the system counts their memory."""

import pytest
import torch
from tiny_served import (
    CPU,
    DTYPE,
    llama_of,
    loaded_from,
    options_of,
    room_of,
    serve_instead,
)

from kvq_cli import compose, machine
from kvq_cli.choosing import choose_cache
from kvq_cli.models.source import resolve
from kvq_cli.models.weight_bytes import weight_bytes

FREE = 12 << 20


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A model whose weights the system counts as free memory, as it does with mapped files."""
    model = llama_of(max_position_embeddings=65536)
    return tmp_path, serve_instead(monkeypatch, tmp_path, model, FREE)


def test_weights_in_a_mapped_file_count_as_much_as_others(tiny):
    path, loaded = tiny
    assert loaded.weight_bytes == weight_bytes(resolve(str(path)), 4) > 10_000
    budget = room_of(path, loaded).budget
    assert compose._left(budget, loaded, CPU) == FREE - loaded.weight_bytes


def test_weights_that_took_memory_are_not_counted_twice(tiny, monkeypatch):
    path, loaded = tiny
    budget = room_of(path, loaded).budget
    left = FREE - loaded.weight_bytes - 1000
    monkeypatch.setattr(machine, "free_bytes", lambda device: left)
    assert compose._left(budget, loaded, CPU) == left
    assert compose._left(budget, loaded, torch.device("cuda")) == left


def test_weights_that_layers_share_count_once():
    tied, free = (llama_of(tie_word_embeddings=tie) for tie in (True, False))
    more = loaded_from(free).weight_bytes - loaded_from(tied).weight_bytes
    assert more == free.lm_head.weight.nbytes


@pytest.mark.parametrize("name", ["bf16", "q8_0", "q4_0"])
def test_what_was_promised_before_weights_loaded_is_what_the_pool_gets(tiny, name):
    path, loaded = tiny
    options = {"memory_ratio": 0.25, "max_running_requests": 1, "max_prefill_tokens": 16}
    before = room_of(path, loaded, **options)
    plan = choose_cache(name, before.shape, before.options, CPU, DTYPE).plan
    promised = before.sized(plan, before.budget)
    assert promised.context < 65536
    wanted = options_of(path, kv_cache_dtype=name, **options)
    found = compose.build_engine(wanted).summary
    assert found.num_tokens == promised.pages * 16
    assert found.max_model_len == promised.context
