"""Conversion happens once, whole or not at all."""

from __future__ import annotations

import os
import resource
import shutil
import threading
import time
from collections import namedtuple
from pathlib import Path

import pytest
import tiny_gguf
import torch
from transformers import AutoModelForCausalLM

from kvq_cli.models import convert as module
from kvq_cli.models.convert import ConversionError, convert
from kvq_cli.models.gguf_file import GgufError


@pytest.fixture
def file(tmp_path) -> Path:
    return tiny_gguf.write(tmp_path / "tiny.gguf", "llama")


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


def test_smollm2s_logits_equal_those_of_transformers_own_reader(smollm2_dir, smollm2_gguf):
    ours = AutoModelForCausalLM.from_pretrained(smollm2_dir)
    theirs = AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    )
    tokens = torch.arange(1000, 1064)[None]
    with torch.no_grad():
        assert torch.equal(ours(tokens).logits, theirs(tokens).logits)


def test_a_file_is_converted_once_and_found_by_its_content(file, cache, tmp_path):
    first = convert(file, cache_dir=cache)
    written = {path: path.stat().st_mtime_ns for path in first.iterdir()}
    assert convert(file, cache_dir=cache) == first
    moved = file.rename(tmp_path / "elsewhere.gguf").rename(tmp_path / "tiny.gguf")
    assert convert(moved, cache_dir=cache) == first
    assert {path: path.stat().st_mtime_ns for path in first.iterdir()} == written


def test_another_content_under_the_same_name_is_another_model(file, cache):
    first = convert(file, cache_dir=cache)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    second = convert(file, cache_dir=cache)
    assert second != first and first.name.startswith("tiny-") and second.name.startswith("tiny-")


def test_progress_reaches_its_total_and_never_goes_back(file, cache):
    told: dict[str, list[tuple[int, int]]] = {}
    convert(file, cache_dir=cache, progress=lambda d, n, m: told.setdefault(d, []).append((n, m)))
    assert list(told) == ["checking tiny.gguf", "converting tiny.gguf"]
    for steps in told.values():
        done, totals = zip(*steps, strict=True)
        assert list(done) == sorted(done) and done[-1] == totals[-1] and len(set(totals)) == 1
    assert len(told["converting tiny.gguf"]) == len(tiny_gguf.tensors("llama"))


def test_large_models_are_cut_into_shards_that_load_as_one(file, cache, monkeypatch):
    whole = AutoModelForCausalLM.from_pretrained(convert(file, cache_dir=cache / "whole"))
    monkeypatch.setattr(module, "SHARD_BYTES", 40_000)
    directory = convert(file, cache_dir=cache / "cut")
    shards = list(directory.glob("*.safetensors"))
    assert len(shards) > 5 and all(shard.stat().st_size < 50_000 for shard in shards)
    cut = AutoModelForCausalLM.from_pretrained(directory).state_dict()
    assert all(torch.equal(cut[name], values) for name, values in whole.state_dict().items())


class Interrupted(BaseException):
    pass


def test_an_interrupted_conversion_leaves_nothing_and_starts_anew(file, cache):
    def interrupt(description, done, total):
        if description.startswith("converting") and done > total // 2:
            raise Interrupted

    with pytest.raises(Interrupted):
        convert(file, cache_dir=cache, progress=interrupt)
    assert list(cache.iterdir()) == []
    assert AutoModelForCausalLM.from_pretrained(convert(file, cache_dir=cache))


def test_what_a_killed_conversion_left_is_not_used_and_removed_when_old(file, cache):
    target = convert(file, cache_dir=cache)
    recent, old = cache / ".partial-recent", cache / ".partial-old"
    (recent / target.name).mkdir(parents=True)
    target.rename(old)
    os.utime(old, (0, time.time() - 2 * 24 * 3600))
    assert convert(file, cache_dir=cache) == target
    assert AutoModelForCausalLM.from_pretrained(target)
    assert sorted(cache.iterdir()) == [recent, target]


def test_two_conversions_of_one_file_at_once_both_get_the_whole_model(file, cache):
    together = threading.Barrier(2)
    found: list[Path] = []

    def meet_when_written(description, done, total):
        if description.startswith("converting") and done == total:
            together.wait(timeout=60)  # both write their copy before either is named

    def run() -> None:
        found.append(convert(file, cache_dir=cache, progress=meet_when_written))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and found[0] == found[1]
    assert list(cache.iterdir()) == [found[0]]
    assert AutoModelForCausalLM.from_pretrained(found[0])


def test_too_little_room_is_said_before_writing(file, cache, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1))
    with pytest.raises(ConversionError, match=r"needed there and 1 are free") as refused:
        convert(file, cache_dir=cache)
    assert str(file) in str(refused.value) and str(cache) in str(refused.value)
    assert list(cache.iterdir()) == []


def test_a_write_that_fails_is_reported_and_leaves_nothing(file, cache):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(ConversionError, match=r"(?i)file too large") as refused:
            convert(file, cache_dir=cache)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(cache) in str(refused.value)
    assert list(cache.iterdir()) == []


def test_a_cache_directory_that_cannot_be_made_is_named(file, tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(ConversionError, match=r"could not be converted into .*taken"):
        convert(file, cache_dir=tmp_path / "taken" / "models")


def test_a_damaged_file_writes_nothing(file, cache):
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(GgufError, match="cut short"):
        convert(file, cache_dir=cache)
    assert not cache.exists()
