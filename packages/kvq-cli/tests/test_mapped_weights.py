"""Weights that a CPU computes with, however the system counts their memory."""

import pytest
import torch
from evaluating import Words
from tiny_models import LAYERS_4_2, SMALL
from transformers import LlamaConfig, LlamaForCausalLM

from kvq_cli import compose, machine, sizing
from kvq_cli.automatic import room_for
from kvq_cli.choosing import choose_cache
from kvq_cli.config import geometry
from kvq_cli.models.loader import LoadedModel
from kvq_cli.models.source import resolve
from kvq_cli.models.weight_bytes import weight_bytes
from kvq_cli.serve_options import ServeOptions

CPU, DTYPE = torch.device("cpu"), torch.float32
FREE = 12 << 20


def llama(**config):
    return LlamaForCausalLM(LlamaConfig(**SMALL | LAYERS_4_2 | {"head_dim": 32} | config)).eval()


def loaded_from(model):
    return LoadedModel(model, Words(), geometry(model.config.to_dict()), "tiny")


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A model whose weights the system counts as free memory, as it does with mapped files."""
    model = llama(max_position_embeddings=65536)
    model.save_pretrained(tmp_path)
    loaded = loaded_from(model)
    monkeypatch.setattr(compose, "load", lambda *_, **__: loaded)
    monkeypatch.setattr(machine, "free_bytes", lambda device: FREE)
    return tmp_path, loaded


def room(path, loaded, **options):
    wanted = ServeOptions(str(path), device="cpu", dtype="float32", **options)
    return room_for(resolve(str(path)), loaded.geometry, wanted, CPU, DTYPE)


def test_weights_in_a_mapped_file_count_as_much_as_others(tiny):
    path, loaded = tiny
    assert loaded.weight_bytes == weight_bytes(resolve(str(path)), 4) > 10_000
    budget = room(path, loaded).budget
    assert compose._left(budget, loaded, CPU) == FREE - loaded.weight_bytes


def test_weights_that_took_memory_are_not_counted_twice(tiny, monkeypatch):
    path, loaded = tiny
    budget = room(path, loaded).budget
    left = FREE - loaded.weight_bytes - 1000
    monkeypatch.setattr(machine, "free_bytes", lambda device: left)
    assert compose._left(budget, loaded, CPU) == left
    assert compose._left(budget, loaded, torch.device("cuda")) == left


def test_weights_that_layers_share_count_once():
    tied, free = (llama(tie_word_embeddings=tie) for tie in (True, False))
    more = loaded_from(free).weight_bytes - loaded_from(tied).weight_bytes
    assert more == free.lm_head.weight.nbytes


@pytest.mark.parametrize("name", ["bf16", "q8_0", "q4_0"])
def test_what_was_promised_before_weights_loaded_is_what_the_pool_gets(tiny, name):
    path, loaded = tiny
    options = {"memory_ratio": 0.25, "max_running_requests": 1, "max_prefill_tokens": 16}
    before = room(path, loaded, **options)
    plan = choose_cache(name, before.shape, before.options, CPU, DTYPE).plan
    pages = sizing.num_pages(before.shape, plan, before.limits, before.budget)
    assert before.context(plan) < 65536
    wanted = ServeOptions(str(path), kv_cache_dtype=name, device="cpu", dtype="float32", **options)
    found = compose.build_engine(wanted).summary
    assert found.num_tokens == pages * 16
    assert found.max_model_len >= before.context(plan)
