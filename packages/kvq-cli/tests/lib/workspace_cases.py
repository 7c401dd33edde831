"""Models and steps whose memory is estimated and measured."""

from typing import Any

from tiny_models import make_engine

from kvq_cli.engine.engine import Engine
from kvq_cli.engine.params import SamplingParams

SIZES = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 8192, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 4}
HALF = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 128}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 8,
    "linear_num_value_heads": 16, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
}  # fmt: skip
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
    "linear attention": ("qwen3_5_text", LINEAR, "q8_0", {"context": 2048, "chunk": 1024}),
    "states of many requests": ("qwen3_next", LINEAR | EXPERTS | {"moe_intermediate_size": 64},
                                "q8_0", {"context": 32, "chunk": 32, "requests": 16}),
    "a large vocabulary": ("llama", {"vocab_size": 50_000}, "q8_0",
                           {"context": 64, "chunk": 512, "requests": 8, "top_p": 0.9}),
}  # fmt: skip


def engine_of(
    model: Any, cache: str, context: int, chunk: int, requests: int = 1, by: str = "auto"
) -> Engine:
    """With room for so many requests that fill their context."""
    return make_engine(
        model,
        cache=cache,
        num_pages=requests * (context // 16 + 1),
        page_tokens=16,
        max_model_len=context,
        max_running_requests=requests,
        max_prefill_tokens=chunk,
        cache_type="none",
        attention_backend=by,
    )


def params_of(top_p: float) -> SamplingParams:
    """Of two tokens that end nothing, drawn from so much of a distribution; 0 = the likeliest."""
    how = {"temperature": 1.0, "top_p": top_p} if top_p else {"temperature": 0.0}
    return SamplingParams(max_tokens=2, seed=0, ignore_eos=True, **how)
