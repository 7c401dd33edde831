"""Plans of published models, against figures worked out elsewhere and bytes that are allocated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from published import CONFIGS
from transformers import AutoConfig, AutoModelForCausalLM

from kvq_cli.config import (
    CacheFormat,
    ModelGeometry,
    build_plan,
    geometry,
    pages_per_request,
    parse_layer_dtypes,
)
from kvq_pools import PlanError, Pool, PoolPlan, window_pages_per_request


def plan_of(model: ModelGeometry, codec: str = "bf16", **options: Any) -> PoolPlan:
    given = {"page_tokens": 64, "max_running_requests": 2, "max_prefill_tokens": 128} | options
    return build_plan(model, CacheFormat(codec, codec), **given)


@pytest.mark.parametrize(
    ("name", "family", "full_bytes", "window_bytes"),
    [
        # layers × KV heads × head_dim × (K and V) × 2 bytes, from the models' own cards
        ("llama-3.1-8b", "mha", 32 * 8 * 128 * 4, 0),
        ("qwen2.5-7b", "mha", 28 * 4 * 128 * 4, 0),
        ("qwen3-30b-a3b", "mha", 48 * 4 * 128 * 4, 0),
        ("smollm3-3b", "mha", 36 * 4 * 128 * 4, 0),
        ("mistral-7b-v0.1", "hybrid_swa", 0, 32 * 8 * 128 * 4),
        ("phi-3-mini-4k", "hybrid_swa", 0, 32 * 32 * 96 * 4),
        ("gemma-2-9b", "hybrid_swa", 21 * 8 * 256 * 4, 21 * 8 * 256 * 4),
        ("gemma-3-4b", "hybrid_swa", 5 * 4 * 256 * 4, 29 * 4 * 256 * 4),
        ("gpt-oss-20b", "hybrid_swa", 12 * 8 * 64 * 4, 12 * 8 * 64 * 4),
        ("qwen3-next-80b-a3b", "mha", 12 * 2 * 256 * 4, 0),
        ("qwen3.5-35b-a3b", "mha", 10 * 2 * 256 * 4, 0),
        ("deepseek-v3", "mla", 61 * 576 * 2, 0),
        ("deepseek-v3.2", "dsa", 61 * (576 + 128) * 2, 0),
        ("glm-shared-indexers", "dsa", 45 * 576 * 2 + 11 * 128 * 2, 0),
        ("qwen4-exp", "qsa", 12 * 2 * 256 * 4 + 12 * 128 * 2 // 4, 0),
    ],
)
def test_bf16_bytes_of_a_token_of_published_models(name, family, full_bytes, window_bytes):
    model = geometry(CONFIGS[name])
    assert model.family == family
    tiers = plan_of(model).token_bytes_by_tier
    assert (tiers.get("full", 0), tiers.get("window", 0)) == (full_bytes, window_bytes)


@pytest.mark.parametrize(
    ("codec", "token_bytes"),
    [
        ("bf16", 20480), ("q8_0", 10880), ("fp8", 10400), ("q6_0", 8320), ("nvfp4", 5920),
        ("q4_0", 5760), ("iso4", 5280), ("iso3", 4000),
    ],
)  # fmt: skip
def test_known_answers_of_a_35b_hybrid(codec, token_bytes):
    assert plan_of(geometry(CONFIGS["qwen3.5-35b-a3b"]), codec).token_bytes == token_bytes


@pytest.mark.parametrize(
    ("ranks", "codec", "token_bytes"),
    [
        (1, "bf16", 25344), (1, "fp8", 13248), (1, "nvfp4", 7872),
        (2, "bf16", 13056), (2, "fp8", 7008), (2, "nvfp4", 4320),
    ],
)  # fmt: skip
def test_known_answers_of_qsa_whose_index_every_rank_keeps_whole(ranks, codec, token_bytes):
    plan = plan_of(geometry(CONFIGS["qwen4-exp"]), codec, ranks=ranks)
    assert plan.token_bytes == token_bytes


@pytest.mark.parametrize(
    ("rank", "rope", "codec", "row_bytes"),
    [
        (512, 64, "bf16", 1152), (512, 64, "fp8", 580), (512, 64, "nvfp4", 328),
        (448, 64, "bf16", 1024), (448, 64, "fp8", 516), (448, 64, "nvfp4", 292),
    ],
)  # fmt: skip
def test_known_answers_of_latent_rows(rank, rope, codec, row_bytes):
    said = {"model_type": "deepseek_v3", "kv_lora_rank": rank, "qk_rope_head_dim": rope}
    assert plan_of(geometry(said), codec).token_bytes == 61 * row_bytes


def test_known_gib_of_160_thousand_tokens_and_of_qsa():
    hybrid, qsa = geometry(CONFIGS["qwen3.5-35b-a3b"]), geometry(CONFIGS["qwen4-exp"])

    def gib(plan: PoolPlan, tokens: int) -> float:
        return round(plan.token_bytes * tokens / 2**30, 2)

    found = [gib(plan_of(hybrid, codec), 160_000) for codec in ("q4_0", "q6_0", "q8_0", "bf16")]
    assert found == [0.86, 1.24, 1.62, 3.05]
    assert gib(plan_of(qsa, "fp8"), 524_480) == 6.47
    assert gib(plan_of(qsa, "fp8", ranks=2), 2_097_152) == 13.69
    assert gib(plan_of(qsa, "nvfp4", ranks=2), 2_097_152) == 8.44


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_planned_bytes_are_allocated_bytes(name, ranks):
    said = CONFIGS[name]
    if isinstance(said.get("text_config"), dict):
        said = said["text_config"]
    small = geometry(said | {"num_key_value_heads": 2, "num_attention_heads": 4})
    plan = plan_of(small, "q8_0", ranks=ranks, page_tokens=4, max_prefill_tokens=8)
    pool = Pool(plan, 3)
    assert pool.nbytes == plan.nbytes(3)


def test_ranks_divide_heads_and_keep_latent_rows_whole():
    llama = geometry(CONFIGS["llama-3.1-8b"])
    whole = plan_of(llama).token_bytes
    assert plan_of(llama, ranks=4).token_bytes == whole / 4
    assert plan_of(llama, ranks=16).token_bytes == whole / 8  # one head, on two ranks each
    with pytest.raises(PlanError, match="8 KV heads can neither be divided among 3 ranks"):
        plan_of(llama, ranks=3)
    latent = geometry(CONFIGS["deepseek-v3.2"])
    assert plan_of(latent, ranks=8) == plan_of(latent)


def test_a_window_tier_holds_the_windows_of_as_many_requests_as_run():
    model = geometry(CONFIGS["gpt-oss-20b"])
    plan = plan_of(model, max_running_requests=5, max_prefill_tokens=300, page_tokens=16)
    each = window_pages_per_request(128, 300, 16)
    assert plan.tier("window").fixed_pages == 5 * each
    assert pages_per_request(model, 8192, page_tokens=16, max_prefill_tokens=300) == 512


def test_where_every_layer_slides_requests_hold_no_more_than_their_window():
    model = geometry(CONFIGS["mistral-7b-v0.1"])
    plan = plan_of(model)
    assert [tier.name for tier in plan.tiers] == ["window"]
    assert plan.tier("window").fixed_pages is None
    each = window_pages_per_request(4096, 128, 64)
    assert pages_per_request(model, 32768, page_tokens=64, max_prefill_tokens=128) == each == 67
    assert pages_per_request(model, 100, page_tokens=64, max_prefill_tokens=128) == 2


def test_p126_each_layers_own_format_drives_its_row_bytes():
    """A layout kind: one codec for all layers must not decide the bytes of each."""
    model = geometry(CONFIGS["gpt-oss-20b"])
    formats = parse_layer_dtypes("0-1:k=bf16,v=q8_0,2-:q4_0", model)
    plan = build_plan(model, formats, page_tokens=16, max_running_requests=1, max_prefill_tokens=16)
    assert [plan.slab("k", layer).spec.name for layer in (0, 1, 2, 23)] == [
        "bf16", "bf16", "q4_0", "q4_0",
    ]  # fmt: skip
    rows = {"bf16": 128, "q8_0": 68, "q4_0": 36}  # bytes of 64 values
    each = 8 * (rows["bf16"] + rows["q8_0"]) + 8 * 11 * 2 * rows["q4_0"]
    assert plan.token_bytes_by_tier == {"full": each, "window": each}


def test_p113_a_hybrids_plan_is_its_window_and_not_full_pages():
    """A capacity kind: window layers priced as if they kept every token, or allocated so."""
    model = geometry(CONFIGS["gpt-oss-20b"])
    plan = build_plan(
        model,
        CacheFormat("bf16", "bf16"),
        page_tokens=16,
        max_running_requests=32,
        max_prefill_tokens=512,
    )
    pages = 32 * 8192 // 16
    window_tokens = 32 * window_pages_per_request(128, 512, 16) * 16
    layer_bytes = 8 * 64 * 2 * 2
    padding = 16 * 24 * layer_bytes
    tokens = 12 * layer_bytes * (32 * 8192 + window_tokens)
    assert plan.nbytes(pages) == tokens + padding
    assert plan.nbytes(pages) < 0.56 * 24 * layer_bytes * 32 * 8192


def test_p020_two_head_widths_have_tiers_of_their_own():
    """A hybrid kind: pages of two widths, scales included, that one size cannot divide."""
    model = geometry({"model_type": "gemma4_text", "num_hidden_layers": 6})
    plan = plan_of(model, "q8_0", page_tokens=16)
    assert {s.dim for s in plan.tier("full").slabs} == {512}
    assert {s.dim for s in plan.tier("window").slabs} == {256}
    assert plan.tier("full").page_bytes(16) == 16 * 1 * 4 * 2 * (512 + 32)
    assert plan.tier("window").page_bytes(16) == 16 * 5 * 4 * 2 * (256 + 16)
    assert Pool(plan, 2).nbytes == plan.nbytes(2)


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text"])
def test_states_take_the_bytes_that_transformers_keeps(model_type):
    experts = {"num_experts": 2, "num_experts_per_tok": 1} if model_type == "qwen3_next" else {}
    config = AutoConfig.for_model(
        model_type, num_hidden_layers=4, hidden_size=64, vocab_size=32, head_dim=32,
        num_attention_heads=4, num_key_value_heads=2, intermediate_size=32,
        linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=8,
        linear_value_head_dim=16, pad_token_id=0, **experts,
    )  # fmt: skip
    with torch.no_grad():
        module = AutoModelForCausalLM.from_config(config)
        cache = module(torch.zeros(1, 9, dtype=torch.int64), use_cache=True).past_key_values
    layers = [layer for layer in cache.layers if hasattr(layer, "recurrent_states")]
    matrices = sum(s.nbytes for layer in layers for s in layer.recurrent_states.values())
    inputs = sum(s.numel() for layer in layers for s in layer.conv_states.values())
    state = geometry(config.to_dict()).state
    assert state is not None and state.layers == (0, 1, 2)
    assert state.request_bytes() == matrices + 2 * inputs


def test_qsa_without_its_indexers_keys_is_refused_and_not_invented():
    with pytest.raises(ValueError, match=r"needs indexer_head_dim and .*, and has neither"):
        geometry({"model_type": "qwen4_exp"})
    with pytest.raises(ValueError, match=r"has indexer_head_dim\. Give"):
        geometry({"model_type": "qwen4_exp", "indexer_head_dim": 128})
