"""Geometry against what transformers' modules hand to their attention function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

import kvq_codecs
from kvq_cli.config import (
    WINDOWS,
    CacheFormat,
    CacheFormatError,
    ConfigError,
    ModelGeometry,
    UnsupportedModel,
    check_format,
    geometry,
    parse_cache_dtype,
    quality_notes,
)

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
    found = geometry(config)
    assert found.num_layers == len(spied_calls) == 7
    for layer, call in enumerate(spied_calls):
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
    assert {model_type for model_type, _ in FAMILIES.values()} == set(WINDOWS)


def test_families_with_windows_have_full_and_window_layers():
    config = AutoConfig.for_model("gemma3_text", **SMALL, sliding_window=16)
    found = geometry(config)
    assert found.full_layers == (5,)
    assert found.window_layers == (0, 1, 2, 3, 4, 6)
    assert found.window == 16
    assert geometry(AutoConfig.for_model("llama", **SMALL)).window is None


def test_a_multimodal_config_gives_its_text_models_geometry():
    text = SMALL | {"model_type": "gemma3_text", "sliding_window": 16}
    found = geometry(transformers.Gemma3Config(text_config=text))
    assert found == geometry(AutoConfig.for_model("gemma3_text", **SMALL, sliding_window=16))


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("deepseek_v3", {}, "latent attention"),
        ("deepseek_v2", {}, "latent attention"),
        ("qwen3_next", {}, "linear-attention layers"),
        ("mamba", {}, "state-space layers"),
        ("jamba", {}, "state-space layers"),
        ("bamba", {}, "state-space layers"),
        ("t5", {}, "encoder-decoder"),
        ("bart", {}, "encoder-decoder"),
        ("gpt2", {}, "not been proved"),
        ("qwen2_moe", SLIDING, "hides the window"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "looks ahead"),
    ],
)
def test_other_models_are_refused_with_the_reason_and_the_supported(model_type, settings, reason):
    with pytest.raises(UnsupportedModel, match=reason) as refused:
        geometry(AutoConfig.for_model(model_type, **settings))
    assert "llama, smollm3, mistral" in str(refused.value)


def test_layers_without_keys_and_values_are_refused():
    config = AutoConfig.for_model("qwen3", **SMALL)
    config.layer_types = ["linear_attention", *config.layer_types[1:]]
    with pytest.raises(UnsupportedModel, match="layers of type linear_attention"):
        geometry(config)


def shape(**changes: Any) -> ModelGeometry:
    facts = {
        "model_type": "llama", "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64,
        "hidden_size": 256, "vocab_size": 8, "max_position": 16, "windows": (None, None),
    }  # fmt: skip
    return ModelGeometry(**(facts | changes))


def test_windows_of_two_sizes_are_refused():
    with pytest.raises(UnsupportedModel, match=r"different sizes \[16, 32\]"):
        shape(windows=(16, 32))


def test_heads_that_do_not_share_evenly_are_refused():
    with pytest.raises(UnsupportedModel, match="4 query heads do not share 3"):
        shape(num_kv_heads=3)


@pytest.mark.parametrize(
    ("text", "k", "v"),
    [
        ("q4_0", "q4_0", "q4_0"),
        ("k=q8_0,v=q4_0", "q8_0", "q4_0"),
        (" v = fp32 , k = bf16 ", "bf16", "fp32"),
    ],
)
def test_cache_dtypes_that_are_understood(text, k, v):
    assert parse_cache_dtype(text) == CacheFormat(k, v)


@pytest.mark.parametrize("name", kvq_codecs.names())
def test_every_codec_is_a_cache_dtype_and_prints_as_one(name):
    assert parse_cache_dtype(str(parse_cache_dtype(name))) == CacheFormat(name, name)
    mixed = f"k={name},v=fp32"
    assert parse_cache_dtype(str(parse_cache_dtype(mixed))) == CacheFormat(name, "fp32")


@pytest.mark.parametrize(
    "text",
    ["", "q5_9", "k=q8_0", "k=q8_0,v=", "k=q8_0,k=q4_0", "q8_0,q4_0", "k=q8_0,v=q4_0,w=q4_0",
     "k=q8_0,q4_0", "Q4_0", "=q4_0,v=q4_0"],
)  # fmt: skip
def test_cache_dtypes_that_are_refused_name_the_given_and_the_allowed(text):
    with pytest.raises(CacheFormatError) as refused:
        parse_cache_dtype(text)
    assert repr(text) in str(refused.value)
    assert all(name in str(refused.value) for name in kvq_codecs.names())


def test_a_codec_wider_than_the_head_is_refused_with_those_that_fit():
    with pytest.raises(CacheFormatError) as refused:
        check_format(shape(head_dim=64), CacheFormat("q8_0", "iso3"))
    text = str(refused.value)
    assert text.startswith("iso3 cannot store the values of this llama model")
    assert "128 values at a time and head_dim 64 is not a multiple" in text
    fitting = text.rsplit(": ", 1)[1].split(", ")
    assert fitting == [n for n in kvq_codecs.names() if not 64 % kvq_codecs.get(n).spec.divisor]
    assert "q8_0" in fitting and "iso4" not in fitting


@pytest.mark.parametrize("name", kvq_codecs.names())
@pytest.mark.parametrize("head_dim", [16, 48, 64, 96, 128, 256])
def test_a_format_is_accepted_exactly_when_its_codec_stores_such_rows(name, head_dim):
    try:
        kvq_codecs.get(name).spec.check(head_dim)
    except ValueError:
        with pytest.raises(ConfigError):
            check_format(shape(head_dim=head_dim), CacheFormat(name, "fp32"))
    else:
        check_format(shape(head_dim=head_dim), CacheFormat(name, "fp32"))


def test_iso_on_gemma3_is_warned_of_and_nothing_else_is():
    gemma = shape(model_type="gemma3_text", head_dim=256)
    (note,) = quality_notes(gemma, CacheFormat("iso3", "q8_0"))
    assert "iso3 is known to ruin Gemma 3" in note and "mean KL of 2.1" in note
    assert all(safer in note for safer in ("q8_0", "q6_0", "k=q8_0,v=q4_0"))
    assert len(quality_notes(gemma, CacheFormat("iso3", "iso4"))) == 2
    assert quality_notes(gemma, CacheFormat("q8_0", "q4_0")) == ()
    assert quality_notes(shape(head_dim=128), CacheFormat("iso3", "iso3")) == ()
