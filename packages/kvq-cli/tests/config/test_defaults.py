"""What a silent config.json means, against transformers' own config classes."""

from __future__ import annotations

import random

import pytest
from transformers import AutoConfig

from kvq_cli.config import PLANNED, SERVED, ConfigError, geometry

# Other values than any family's defaults; kv heads of every default divide 32 heads.
SIZES = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 80,
    "num_hidden_layers": 14,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 48,
    "max_position_embeddings": 160,
    "eos_token_id": 3,
}
WINDOW = {"sliding_window": 24}
OPTIONAL = WINDOW | {"use_sliding_window": True, "max_window_layers": 5}
EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 40}
LINEAR = {
    "full_attention_interval": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 40,
    "linear_conv_kernel_dim": 3,
}
LATENT = EXPERTS | {"kv_lora_rank": 96, "qk_rope_head_dim": 32, "n_shared_experts": 2}
INDEX = {"index_head_dim": 40}
OWN = {
    "llama": {},
    "smollm3": {"use_sliding_window": True, "sliding_window": 24, "no_rope_layer_interval": 3},
    "mistral": WINDOW,
    "qwen2": OPTIONAL,
    "qwen2_moe": OPTIONAL | EXPERTS | {"shared_expert_intermediate_size": 56},
    "qwen3": OPTIONAL,
    "qwen3_moe": OPTIONAL | EXPERTS,
    "gemma2": WINDOW | {"attn_logit_softcapping": 20.0},
    "gemma3_text": WINDOW | {"sliding_window_pattern": 4},
    "gpt_oss": WINDOW | {"num_experts_per_tok": 3},
    "phi3": WINDOW,
    "olmo2": {},
    "granite": {},
    "gemma4_text": WINDOW
    | {"global_head_dim": 96, "attention_k_eq_v": True, "num_global_key_value_heads": 2}
    | {"num_kv_shared_layers": 3},
    "qwen3_next": LINEAR | EXPERTS | {"shared_expert_intermediate_size": 56},
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": LINEAR | EXPERTS | {"shared_expert_intermediate_size": 56},
    "qwen4_exp_text": LINEAR | EXPERTS | {"shared_expert_intermediate_size": 56},
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT | INDEX,
    "glm_moe_dsa": LATENT | INDEX | {"index_topk_freq": 4, "index_skip_topk_offset": 3},
}
# What transformers demands of this family in any case.
ALWAYS = {
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 128,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        },
    }
}


def test_every_family_is_here():
    assert set(OWN) == set(PLANNED) >= set(SERVED)


@pytest.mark.parametrize("model_type", PLANNED)
def test_a_silent_config_means_what_transformers_fills_in(model_type):
    everything = SIZES | OWN[model_type]
    draw = random.Random(model_type)
    chances = [0.0, 1.0, *(draw.random() for _ in range(30))]
    for chance in chances:
        said = {key: value for key, value in everything.items() if draw.random() >= chance}
        said |= ALWAYS.get(model_type, {})
        filled = AutoConfig.for_model(model_type, **said)
        found = geometry({"model_type": model_type, **said})
        assert found == geometry(filled.to_dict()), said
        assert found.num_layers == filled.num_hidden_layers
        assert found.num_heads == filled.num_attention_heads
        assert (found.hidden_size, found.vocab_size) == (filled.hidden_size, filled.vocab_size)
        assert found.max_position == filled.max_position_embeddings
        assert found.eos_token_ids == (
            () if filled.eos_token_id is None else (filled.eos_token_id,)
        )


@pytest.mark.parametrize("model_type", [t for t in PLANNED if t not in ("mistral", "phi3")])
def test_the_layers_are_those_that_transformers_derives(model_type):
    for window in ({}, {"use_sliding_window": True, "sliding_window": 24}):
        said = SIZES | OWN[model_type] | ALWAYS.get(model_type, {}) | window
        filled = AutoConfig.for_model(model_type, **said)
        kinds = getattr(filled, "layer_types", None)
        if kinds is None:
            continue
        found = geometry({"model_type": model_type, **said})
        state = found.state.layers if found.state else ()
        for layer, kind in enumerate(kinds):
            slides = kind == "sliding_attention" and bool(filled.sliding_window)
            assert found.windows[layer] == (filled.sliding_window if slides else None)
            assert (layer in state) == (kind == "linear_attention")


@pytest.mark.parametrize(
    "said",
    [
        {"index_topk_pattern": "FSSSF" + "S" * 9},
        {"index_topk_freq": 4},
        {"index_topk_freq": 3, "index_skip_topk_offset": 4},
        {"indexer_types": ["full", "shared"] * 7},
        {},
    ],
)
def test_layers_that_share_an_indexer_store_no_index_keys(said):
    filled = AutoConfig.for_model("glm_moe_dsa", num_hidden_layers=14, **said)
    found = geometry({"model_type": "glm_moe_dsa", "num_hidden_layers": 14, **said})
    own = tuple(i for i, kind in enumerate(filled.indexer_types) if kind == "full")
    assert found.index is not None and found.index.layers == own
    assert found.cached_layers == tuple(range(14))


@pytest.mark.parametrize("model_type", PLANNED)
def test_a_damaged_setting_is_an_error_that_names_the_model_and_never_another(model_type):
    said = {"model_type": model_type} | SIZES | OWN[model_type] | ALWAYS.get(model_type, {})
    said |= dict.fromkeys(("layer_types", "indexer_types", "no_rope_layers", "per_layer_config"))
    refused = 0
    for key in said.keys() - {"model_type"}:
        for value in (None, -1, 0, 1.5, "x", [], [1], [None] * 14, {}, {"a": {}}, True):
            try:
                geometry(said | {key: value})
            except ConfigError as error:
                assert model_type in str(error)
                refused += 1
    assert refused > 30
