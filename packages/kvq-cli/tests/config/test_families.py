"""Geometry against what transformers' modules hand to their attention function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from geometries import shape
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from kvq_cli.config import SERVED, UnsupportedModel, check_servable, geometry

SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SLIDING = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3}
FAMILIES = {
    "llama": ("llama", {}),
    "llama with its own head_dim": ("llama", {"head_dim": 32}),
    "llama without grouped heads": ("llama", {"num_key_value_heads": None}),
    "llama that names a window it ignores": ("llama", {"sliding_window": 16}),
    "smollm3": ("smollm3", {}),
    "smollm3 with windows": ("smollm3", {"use_sliding_window": True, "sliding_window": 16}),
    "mistral": ("mistral", {"sliding_window": 16}),
    "mistral without window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"sliding_window": 16}),
    "qwen2 with windows": ("qwen2", SLIDING),
    "qwen2_moe": ("qwen2_moe", MOE | {"shared_expert_intermediate_size": 32}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3 with windows": ("qwen3", SLIDING | {"head_dim": 32}),
    "qwen3_moe": ("qwen3_moe", MOE | {"head_dim": 32}),
    "qwen3_moe with windows": ("qwen3_moe", MOE | SLIDING | {"head_dim": 32}),
    "gemma2": ("gemma2", {"head_dim": 32, "sliding_window": 16}),
    "gemma2 without soft cap": ("gemma2", {"sliding_window": 16, "attn_logit_softcapping": None}),
    "gemma3_text": ("gemma3_text", {"head_dim": 32, "sliding_window": 16}),
    "gemma3_text with its own pattern": (
        "gemma3_text",
        {"sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"] * 3
         + ["full_attention"]},
    ),
    "gpt_oss": (
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16, "head_dim": 32},
    ),
    "phi3": ("phi3", {"sliding_window": 16}),
    "phi3 without window": ("phi3", {}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {"attention_multiplier": 0.1}),
    "qwen3_next": ("qwen3_next", MOE | {"head_dim": 32, "shared_expert_intermediate_size": 32}),
    "qwen3_5_text": ("qwen3_5_text", {"head_dim": 32}),
    "qwen3_5_moe_text": (
        "qwen3_5_moe_text", MOE | {"head_dim": 32, "shared_expert_intermediate_size": 32}
    ),
}  # fmt: skip


@pytest.fixture
def spied_calls():
    """What each layer's attention is called with, in order, under the name `spy`."""
    calls: list[dict[str, Any]] = []

    def spy(module, query, key, value, mask, **given):
        calls.append({"q": query.shape, "k": key.shape, "v": value.shape, **given})
        return torch.zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    AttentionInterface.register("spy", spy)
    AttentionMaskInterface.register("spy", lambda *args, **kwargs: None)
    yield calls
    AttentionInterface._global_mapping.pop("spy")
    AttentionMaskInterface._global_mapping.pop("spy")


@pytest.mark.parametrize("family", FAMILIES)
def test_geometry_is_what_the_models_modules_ask_of_attention(family, spied_calls):
    model_type, settings = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **(SMALL | settings))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="spy")
    with torch.no_grad():
        model(torch.zeros(1, 3, dtype=torch.int64), use_cache=False)
    found = geometry(config.to_dict())
    assert found.num_layers == 7
    for layer, call in zip(found.cached_layers, spied_calls, strict=True):
        assert call["q"] == (1, found.num_heads, 3, found.head_dim)
        assert call["k"] == call["v"] == (1, found.num_kv_heads, 3, found.head_dim)
        assert (call.get("sliding_window") or None) == found.windows[layer]
        assert call.get("softcap") == found.softcap
        assert (call.get("s_aux") is not None) == found.has_sinks
    embedding = model.get_input_embeddings().weight
    assert (found.vocab_size, found.hidden_size) == embedding.shape
    assert (found.model_type, found.max_position) == (model_type, 128)
    assert found.eos_token_ids == (2,)


def test_every_supported_family_is_compared():
    assert {model_type for model_type, _ in FAMILIES.values()} == set(SERVED)


def test_families_with_windows_have_full_and_window_layers():
    config = AutoConfig.for_model("gemma3_text", **SMALL, sliding_window=16)
    found = geometry(config.to_dict())
    assert found.full_layers == (5,)
    assert found.window_layers == (0, 1, 2, 3, 4, 6)
    assert found.window == 16
    assert geometry(AutoConfig.for_model("llama", **SMALL).to_dict()).window is None


def test_a_multimodal_config_gives_its_text_models_geometry():
    text = SMALL | {"model_type": "gemma3_text", "sliding_window": 16}
    found = geometry(transformers.Gemma3Config(text_config=text).to_dict())
    assert found == geometry(
        AutoConfig.for_model("gemma3_text", **SMALL, sliding_window=16).to_dict()
    )


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("deepseek_v2", "latent attention"),
        ("mamba", "state-space layers"),
        ("jamba", "state-space layers"),
        ("bamba", "state-space layers"),
        ("t5", "encoder-decoder"),
        ("bart", "encoder-decoder"),
        ("gpt2", "not been proved"),
    ],
)
def test_unknown_models_are_refused_with_the_reason_and_the_known(model_type, reason):
    with pytest.raises(UnsupportedModel, match=reason) as refused:
        geometry(AutoConfig.for_model(model_type).to_dict())
    assert "llama, smollm3, mistral" in str(refused.value)


def test_attention_that_looks_ahead_has_no_cache():
    config = AutoConfig.for_model("gemma3_text", use_bidirectional_attention=True)
    with pytest.raises(UnsupportedModel, match="looks ahead"):
        geometry(config.to_dict())


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("deepseek_v3", {}, "latent attention"),
        ("deepseek_v32", {}, "latent attention"),
        ("glm_moe_dsa", {}, "latent attention"),
        ("qwen4_exp_text", {"indexer_head_dim": 128, "indexer_compress_ratio": 4}, "sparse"),
        ("gemma4_text", {}, "not been proved"),
        ("qwen2_moe", SLIDING, "hides the window"),
    ],
)
def test_what_is_planned_but_not_served_is_refused_with_the_reason(model_type, settings, reason):
    model = geometry({"model_type": model_type, **settings})
    with pytest.raises(UnsupportedModel, match=reason) as refused:
        check_servable(model)
    assert "llama, smollm3, mistral" in str(refused.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_served_passes(family):
    model_type, settings = FAMILIES[family]
    check_servable(geometry({"model_type": model_type, **SMALL, **settings}))


@pytest.mark.parametrize(
    ("model_type", "settings", "names"),
    [
        (
            "qwen4_exp_text",
            {"indexer_head_dim": 128, "indexer_compress_ratio": 4},
            ("indexed_attention", "qwen_sparse_attention", "full_attention"),
        ),
        ("deepseek_v32", {}, ("indexed_attention", "deepseek_sparse_attention")),
        ("glm_moe_dsa", {}, ("indexed_attention", "deepseek_sparse_attention")),
    ],
)
def test_every_name_that_a_release_gave_to_sparse_layers_is_the_same_kind(
    model_type, settings, names
):
    silent = geometry({"model_type": model_type, **settings})
    rows = silent.num_layers
    linear = silent.state.layers if silent.state else ()
    for name in names:
        types = ["linear_attention" if i in linear else name for i in range(rows)]
        assert geometry({"model_type": model_type, **settings, "layer_types": types}) == silent


def test_layers_without_keys_and_values_are_refused():
    config = AutoConfig.for_model("qwen3", **SMALL)
    config.layer_types = ["linear_attention", *config.layer_types[1:]]
    with pytest.raises(UnsupportedModel, match="layers of type linear_attention"):
        geometry(config.to_dict())


def test_windows_of_two_sizes_are_refused():
    with pytest.raises(UnsupportedModel, match=r"different sizes \[16, 32\]"):
        shape(windows=(16, 32))


def test_heads_that_do_not_share_evenly_are_refused():
    with pytest.raises(UnsupportedModel, match="4 query heads do not share 3"):
        shape(num_kv_heads=3)
