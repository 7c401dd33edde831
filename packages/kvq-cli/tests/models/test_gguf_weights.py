"""Tiny files of every architecture, converted by us and read by transformers' own reader."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_gguf
import torch
from transformers import AutoModelForCausalLM

from kvq_cli.models.convert import convert

ARCHITECTURES = ("llama", "qwen2", "qwen3", "phi3", "gemma2", "gemma3")


def read_by_transformers(file: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, local_files_only=True
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_and_logits_equal_transformers_own_reader(architecture, tmp_path):

    file = tiny_gguf.write(tmp_path / "tiny.gguf", architecture)
    ours = AutoModelForCausalLM.from_pretrained(convert(file, cache_dir=tmp_path / "cache"))
    theirs = read_by_transformers(file)
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for name, values in ours.state_dict().items():
        assert torch.equal(values, expected[name]), name
    tokens = torch.arange(48)[None]
    with torch.no_grad():
        assert torch.equal(ours(tokens).logits, theirs(tokens).logits)
