"""P128: a checkpoint that declares the format of its KV cache is heard, not obeyed in silence."""

from __future__ import annotations

from typing import Any

import pytest

from kvq_cli.config import choose_format, declared_cache, parse_cache_dtype

FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


def scheme(**keys: Any) -> dict[str, Any]:
    """A config.json as compressed-tensors writes it."""
    quantization = {"quant_method": "compressed-tensors", "kv_cache_scheme": {**FP8, **keys}}
    return {"model_type": "llama", "quantization_config": quantization}


def algorithm(name: Any) -> dict[str, Any]:
    """… as ModelOpt does."""
    return {"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": name}}


def unasked() -> tuple[str, str]:
    """What memory would have: it is not looked at."""
    raise AssertionError


@pytest.mark.parametrize(
    ("config", "codec"),
    [
        (scheme(), "fp8"),
        (scheme(strategy="attn_head", dynamic=True), "fp8"),
        (scheme(num_bits=4, strategy="tensor_group", group_size=16), "nvfp4"),
        (scheme(type="int"), "q8_0"),
        (scheme(type="int", num_bits=4, strategy="group", group_size=32), "q4_0"),
        ({"text_config": scheme()}, "fp8"),
        (algorithm("FP8"), "fp8"),
        (algorithm("NVFP4"), "nvfp4"),
        (algorithm("INT8"), "q8_0"),
    ],
)
def test_p128_what_is_declared_is_stored_in_the_codec_of_its_kind(
    config: dict[str, Any], codec: str
) -> None:
    parse_cache_dtype(codec)
    chosen, (note,) = choose_format("auto", config, unasked)
    assert chosen == codec
    key = "kv_cache_quant_algo" if "modelopt" in str(config) else "kv_cache_scheme"
    assert note.startswith(f"the checkpoint declares its KV cache's format ({key} ")
    assert f"stored as {codec}" in note and "--kv-cache-dtype overrides it" in note


@pytest.mark.parametrize("config", [scheme(), algorithm("NVFP4"), algorithm("W3")])
def test_p128_the_user_s_word_counts_and_the_declaration_is_said(config: dict[str, Any]) -> None:
    chosen, (note,) = choose_format("k=q8_0,v=q4_0", config, unasked)
    assert chosen == "k=q8_0,v=q4_0"
    assert note.endswith("; k=q8_0,v=q4_0 is used, as asked")


@pytest.mark.parametrize(
    "config",
    [
        scheme(num_bits=3),
        scheme(num_bits=[8]),
        scheme(type=None),
        algorithm("W3"),
        algorithm({"a": 1}),
        {"quantization_config": {"kv_cache_scheme": "fp8"}},
    ],
)
def test_p128_what_kvq_has_no_codec_for_is_said(config: dict[str, Any]) -> None:
    chosen, (note, why) = choose_format("auto", config, lambda: ("q6_0", "it fits"))
    assert (chosen, why) == ("q6_0", "it fits")
    assert note.endswith("which kvq has no codec for")


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"quantization_config": None},
        {"quantization_config": "fp8"},
        {"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": None}},
        {"quantization_config": {"kv_cache_quant_algo": None}, "text_config": None},
    ],
)
def test_where_nothing_is_declared_memory_decides(config: dict[str, Any]) -> None:
    assert declared_cache(config) is None
    assert choose_format("auto", config, lambda: ("q6_0", "it fits")) == ("q6_0", ("it fits",))
    assert choose_format("fp8", config, unasked) == ("fp8", ())
