"""Weights that a CPU computes with, however the system counts their memory."""

from types import SimpleNamespace

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
from transformers import AutoModelForCausalLM

from kvq_cli import compose, machine
from kvq_cli.choosing import choose_cache
from kvq_cli.models.source import resolve
from kvq_cli.models.weight_bytes import weight_bytes
from kvq_pools import BudgetError, RebuildRejected

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
    monkeypatch.setattr(machine, "free_bytes", lambda device, mapped_bytes=0: left)
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
    choice = choose_cache(name, before.shape, before.options, CPU, DTYPE)
    promised = before.sized(choice, before.budget)
    assert promised.context < 65536
    wanted = options_of(path, kv_cache_dtype=name, **options)
    found = compose.build_engine(wanted).summary
    assert found.num_tokens == promised.pages * 16
    assert found.max_model_len == promised.context


@pytest.fixture
def saved(tmp_path):
    """A model's directory."""
    llama_of().save_pretrained(tmp_path)
    return tmp_path


def read(path, dtype):
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True).eval()


def test_weights_that_are_a_mapped_file_are_told_from_those_that_took_memory(saved, tmp_path):
    mapped, cast = (read(saved, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert machine.mapped_bytes(mapped.parameters()) == loaded_from(mapped).weight_bytes
    assert machine.mapped_bytes(cast.parameters()) == 0
    assert machine.mapped_bytes([mapped.lm_head.weight, torch.ones(3)]) == (
        mapped.lm_head.weight.nbytes
    )
    # elsewhere than on Linux what was read is seen to be used
    assert machine.mapped_bytes(mapped.parameters(), tmp_path / "absent") == 0


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "in memory"])
def test_a_rebuild_may_take_what_a_start_may_and_no_page_more(saved, monkeypatch, mapped):
    loaded = loaded_from(read(saved, torch.float32) if mapped else llama_of())
    weights = 0 if mapped else loaded.weight_bytes  # as the system counts them
    used = 0

    def load(*_, **__):
        nonlocal used
        used = weights
        return loaded

    def start(pages):
        nonlocal used
        used = 0
        options = options_of(saved, num_pages=pages, max_model_len=64, kv_cache_dtype="q8_0")
        return compose.build_engine(options)._engine

    monkeypatch.setattr(compose, "load", load)
    monkeypatch.setattr(machine.cgroups, "free_bytes", lambda mapped_bytes: None)
    monkeypatch.setattr(
        machine.psutil, "virtual_memory", lambda: SimpleNamespace(available=FREE - used)
    )
    room = room_of(saved, loaded, max_model_len=64)
    plan = choose_cache("q8_0", room.shape, room.options, CPU, DTYPE).plan
    most = plan.pages_for(room.budget.largest_bytes - room.limits.needs(room.shape, 64))
    with pytest.raises(BudgetError, match=f"at most {most} pages"):
        start(most + 1)
    assert start(most).cache.pool.num_pages == most

    engine = start(10)
    used += engine.cache.pool.nbytes
    with pytest.raises(RebuildRejected, match=rf"about {most * 16:,} tokens fit"):
        engine.rebuild(num_tokens=(most + 1) * 16)
    assert engine.rebuild(num_tokens=most * 16).after.num_tokens == most * 16


given: list[int] = []


@pytest.mark.parametrize("library", [object(), type("glibc", (), {"malloc_trim": given.append})])
def test_memory_is_given_back_where_the_c_library_can(library, monkeypatch):
    given.clear()
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda _: library)
    machine.trim()
    assert given == [0] * hasattr(library, "malloc_trim")
