"""Configs of GGUF files against transformers' own reader and rotary embeddings."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_gguf
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvq_cli.models.gguf_config import hf_config
from kvq_cli.models.gguf_file import GgufError, read_gguf

# Where ours says more than transformers' reader, or says it in another way.
OWN = {"eos_token_id", "bos_token_id", "pad_token_id", "_name_or_path", "dtype"}


@pytest.mark.parametrize("architecture", tiny_gguf.DIMS)
def test_config_equals_transformers_own_reading(architecture, tmp_path):
    path = tiny_gguf.write(tmp_path / "tiny.gguf", architecture)
    ours = hf_config(read_gguf(path)).to_dict()
    theirs = AutoConfig.from_pretrained(tmp_path, gguf_file=path.name, pad_token_id=0).to_dict()
    shared = ours.keys() & theirs.keys() - OWN
    assert {"rope_parameters", "hidden_size", "num_key_value_heads", "vocab_size"} <= shared
    assert {k: ours[k] for k in shared} == {k: theirs[k] for k in shared}


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_factors_become_its_rope_scaling(factor, tmp_path):
    dim = tiny_gguf.DIMS["llama"]
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    wanted = AutoConfig.for_model(
        "llama", head_dim=dim, max_position_embeddings=131072, rope_parameters=scaling
    )
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](wanted, torch.device("cpu"))
    plain = 500000.0 ** -(np.arange(0, dim, 2) / dim)
    values = tiny_gguf.tensors("llama")
    values["rope_freqs.weight"] = (plain / frequencies.numpy()).astype(np.float32)
    fields = {"rope.freq_base": 500000.0, "context_length": 131072}
    path = tiny_gguf.write(tmp_path / "tiny.gguf", "llama", values=values, fields=fields)
    assert hf_config(read_gguf(path)).rope_parameters == scaling


def test_rope_factors_of_another_making_are_refused(tmp_path):
    values = tiny_gguf.tensors("llama")
    values["rope_freqs.weight"] = np.linspace(1, 3, tiny_gguf.DIMS["llama"] // 2, dtype=np.float32)
    path = tiny_gguf.write(tmp_path / "tiny.gguf", "llama", values=values)
    with pytest.raises(GgufError, match=r"not those of Llama 3\.1"):
        hf_config(read_gguf(path))


def test_linear_rope_scaling_is_kept_on_gemma3s_full_layers(tmp_path):
    fields = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base": 1e6}
    path = tiny_gguf.write(tmp_path / "tiny.gguf", "gemma3", fields=fields)
    assert hf_config(read_gguf(path)).rope_parameters == {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }


@pytest.mark.parametrize(("architecture", "blocks"), [("gemma2", 46), ("gemma3", 62)])
def test_the_deepest_gemmas_scale_queries_by_width_over_heads(architecture, blocks, tmp_path):
    fields = {"block_count": blocks}
    path = tiny_gguf.write(tmp_path / "tiny.gguf", architecture, fields=fields)
    expected = tiny_gguf.WIDTH // tiny_gguf.HEADS
    assert hf_config(read_gguf(path)).query_pre_attn_scalar == expected


@pytest.mark.parametrize(
    ("architecture", "fields", "complaint"),
    [
        ("llama", {"rope.scaling.type": "yarn"}, "rope scaling 'yarn' is not converted"),
        ("llama", {"expert_count": 8}, "mixture of experts"),
        ("llama", {"rope.dimension_count": 8}, "rope.dimension_count 8 differs from head_dim 16"),
        ("llama", {"attention.value_length": 32}, "attention.value_length 32 differs"),
        ("llama", {"block_count": None}, "llama.block_count is None, one integer is needed"),
        ("gemma3", {"attention.sliding_window": None}, "sliding_window is None"),
    ],
)
def test_what_cannot_be_converted_is_refused(architecture, fields, complaint, tmp_path):
    path = tiny_gguf.write(tmp_path / "tiny.gguf", architecture, fields=fields)
    with pytest.raises(GgufError, match=complaint):
        hf_config(read_gguf(path))


def test_a_part_of_a_model_is_refused(tmp_path):
    file = read_gguf(tiny_gguf.write(tmp_path / "tiny-00001-of-00003.gguf", "llama"))
    file.metadata["split.count"] = 3
    with pytest.raises(GgufError, match="one of 3 parts of a model; join them"):
        hf_config(file)


def test_other_architectures_are_refused_with_those_converted(tmp_path):
    path = tiny_gguf.write(tmp_path / "tiny.gguf", "mamba", values=tiny_gguf.tensors("llama"))
    with pytest.raises(GgufError, match="architecture 'mamba'; GGUF files of llama, qwen2, qwen3"):
        hf_config(read_gguf(path))


def test_a_file_without_a_language_model_is_refused(tmp_path):
    values = {"v.blk.0.attn_q.weight": np.zeros((4, 4), np.float32)}
    path = tiny_gguf.write(tmp_path / "mmproj.gguf", "llama", values=values)
    with pytest.raises(GgufError, match="holds no language model"):
        hf_config(read_gguf(path))
