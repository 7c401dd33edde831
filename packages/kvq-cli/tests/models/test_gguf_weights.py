"""Tiny files of every architecture, converted by us and read by transformers' own reader."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_gguf
import torch
from transformers import AutoModelForCausalLM

from kvq_cli.models.convert import convert
from kvq_cli.models.gguf_file import GgufError


@pytest.mark.parametrize("architecture", tiny_gguf.DIMS)
def test_weights_and_logits_equal_transformers_own_reader(architecture, tmp_path):
    file = tiny_gguf.write(tmp_path / "tiny.gguf", architecture)
    ours = AutoModelForCausalLM.from_pretrained(convert(file, cache_dir=tmp_path / "cache"))
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.float32, pad_token_id=0
    )
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for name, values in ours.state_dict().items():
        assert torch.equal(values, expected[name]), name
    tokens = torch.arange(48)[None]
    with torch.no_grad():
        assert torch.equal(ours(tokens).logits, theirs(tokens).logits)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"blk.3.attn_k.weight": None}, "lacks 1 tensors, model.layers.3.self_attn.k_proj"),
        (
            {"blk.0.attn_q.bias": np.zeros(64, np.float32)},
            "has no place for, blk.0.attn_q.bias among them",
        ),
        (
            {"blk.1.ffn_up.weight": np.zeros((8, 64), np.float32)},
            r"blk.1.ffn_up.weight has shape \(8, 64\), \(96, 64\) is needed",
        ),
    ],
)
def test_tensors_that_do_not_make_the_model_are_refused(change, complaint, tmp_path):
    values = tiny_gguf.tensors("llama") | change
    kept = {name: data for name, data in values.items() if data is not None}
    file = tiny_gguf.write(tmp_path / "tiny.gguf", "llama", values=kept)
    with pytest.raises(GgufError, match=complaint):
        convert(file, cache_dir=tmp_path / "cache")
