"""The estimate of a step's workspace against the bytes that really live during steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from geometries import shape
from live_memory import LiveMemory
from published import CONFIGS
from tiny_models import make_engine
from transformers import AutoConfig, AutoModelForCausalLM

from kvq_attention import reference
from kvq_attention.triton import tiles
from kvq_cli.config import geometry, workspace
from kvq_cli.config.workspace import BLOCK_ROWS, SCORE_BYTES
from kvq_cli.engine.params import SamplingParams

SIZES = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 8192, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 4}
HALF = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 128}
LONG, STEP = {"context": 4096, "chunk": 64}, {"context": 512, "chunk": 500}
CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "a long context": ("llama", {}, "q8_0", LONG),
    "a long context in nvfp4": ("llama", {}, "nvfp4", LONG),
    "many query heads": ("llama", {"num_attention_heads": 16, "num_key_value_heads": 1}, "q4_0",
                         {"context": 2048, "chunk": 128}),
    "as many KV heads": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 8}, "q8_0",
                         {"context": 2048, "chunk": 32}),
    "a long step": ("llama", {}, "q8_0", {"context": 2048, "chunk": 2048}),
    "a long step in bf16": ("llama", {"dtype": "bfloat16"}, "fp8",
                            {"context": 2048, "chunk": 1024}),
    "a wide feed-forward": ("llama", {"intermediate_size": 8192}, "q8_0", STEP),
    "a wide feed-forward of phi3": ("phi3", {"intermediate_size": 8192}, "q8_0", STEP),
    "a wide stream": ("llama", {"hidden_size": 2048}, "q8_0", STEP),
    "a wide stream of gemma3": ("gemma3_text", HALF | {"hidden_size": 2048}, "q4_0", STEP),
    "windows": ("gemma3_text", HALF, "q4_0", {"context": 4096, "chunk": 256}),
    "soft caps": ("gemma2", HALF, "q4_0", {"context": 4096, "chunk": 256}),
    "only windows": ("mistral", {"sliding_window": 256}, "q4_0", {"context": 2048, "chunk": 256}),
    "experts": ("qwen3_moe", EXPERTS | {"moe_intermediate_size": 1024}, "bf16", STEP),
    "experts that clamp": ("gpt_oss", EXPERTS | {"intermediate_size": 1024}, "bf16", STEP),
    "a large vocabulary": ("llama", {"vocab_size": 50_000}, "q8_0",
                           {"context": 64, "chunk": 512, "requests": 8, "temperature": 1.0}),
}  # fmt: skip


def peak_bytes(
    model: Any, cache: str, context: int, chunk: int, requests: int = 1, temperature: float = 0.0
) -> int:
    """Most bytes alive in any step while requests fill their context."""
    engine = make_engine(
        model,
        cache=cache,
        num_pages=requests * (context // 16 + 1),
        page_tokens=16,
        max_model_len=context,
        max_running_requests=requests,
        max_prefill_tokens=chunk,
        cache_type="none",
    )
    params = SamplingParams(max_tokens=2, temperature=temperature, seed=0, ignore_eos=True)
    for name in range(requests):
        engine.add(str(name), [1 + i % 400 for i in range(context - 2)], params)
    peak = 0
    while engine.has_work:
        with LiveMemory() as memory:
            engine.step()
        peak = max(peak, memory.peak)
    return peak


@pytest.mark.parametrize("case", CASES)
def test_f39_a_steps_workspace_is_no_more_than_estimated_and_not_far_less(case):
    """A capacity kind: the pool fits and the start fails, for what computing takes."""
    model_type, settings, cache, load = CASES[case]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(SIZES | settings))
    dtype = getattr(torch, settings.get("dtype", "float32"))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    estimate = workspace(
        geometry(config.to_dict()),
        context=load["context"],
        max_running_requests=load.get("requests", 1),
        max_prefill_tokens=load["chunk"],
        value_bytes=dtype.itemsize,
        on_host=True,
    )
    measured = peak_bytes(model, cache, **load)
    assert measured <= estimate.nbytes <= 3.5 * measured, (measured, estimate)


def test_the_meter_counts_what_lives_and_forgets_what_is_gone():
    with LiveMemory() as memory:
        a = torch.zeros(1000, dtype=torch.uint8)
        for _ in range(5):
            b = a + 1
            del b
        c = a.view(10, 100)[3:]
    assert memory.peak == 2000 and c.shape == (7, 100)


def test_the_estimate_knows_the_references_blocks():
    assert (SCORE_BYTES, BLOCK_ROWS) == (reference.SCORE_BYTES, reference.BLOCK_ROWS)


def test_workspace_grows_with_what_it_depends_on_and_shrinks_with_ranks():
    base = {"context": 4096, "max_running_requests": 4, "max_prefill_tokens": 512}

    def needed(**changes: int) -> int:
        return workspace(geometry(CONFIGS["llama-3.1-8b"]), **(base | changes)).nbytes

    for more in ({"context": 8192}, {"max_running_requests": 400}, {"max_prefill_tokens": 5120}):
        assert needed(**more) > needed()
    assert needed(value_bytes=4) > needed() > needed(on_host=True)
    assert needed(ranks=2) < needed()


def test_where_every_layer_forgets_the_context_does_not_matter():
    model = shape(windows=(64, 64), max_position=10**6)
    limits = {"max_running_requests": 2, "max_prefill_tokens": 32}
    assert workspace(model, context=10**6, **limits) == workspace(model, context=95, **limits)


@pytest.mark.parametrize("context", [1000, 1025, 5000, 30_000, 131_072])
def test_packed_prefills_keep_partial_results_on_a_gpu(context):
    """One of each query, head and chunk, as Triton's decode counts them at most."""
    model = geometry(CONFIGS["llama-3.1-8b"])
    limits = {"context": context, "max_running_requests": 4, "max_prefill_tokens": 512}

    def needed(**how: bool) -> int:
        return workspace(model, **limits, **how).attention

    shape = {"warps": 4, "stages": 2, "programs": 1}
    chunks = max(
        tiles.most_chunks(context, None, 512, tiles.Config(tokens=tokens, **shape))
        for tokens in (16, 32, 64, 128)
    )
    least = (512 + 4) * model.num_heads * chunks * model.head_dim * 4 if chunks > 1 else 0
    assert least <= needed(packed_prefill=True) - needed() <= 2 * least
    assert needed(packed_prefill=True, on_host=True) == needed(on_host=True)
