"""The config.json of published models, as far as it concerns their cache."""

from __future__ import annotations

from typing import Any


def _said(
    model_type: str, hidden: int, layers: int, heads: int, kv_heads: int, positions: int,
    **others: Any,
) -> dict[str, Any]:  # fmt: skip
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
        "torch_dtype": "bfloat16",
        **others,
    }


_LINEAR = {
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _said("llama", 4096, 32, 32, 8, 131072, vocab_size=128256),
    "qwen2.5-7b": _said(
        "qwen2", 3584, 28, 28, 4, 32768, vocab_size=152064, use_sliding_window=False,
        sliding_window=131072, max_window_layers=28,
    ),
    "qwen3-30b-a3b": _said(
        "qwen3_moe", 2048, 48, 32, 4, 40960, head_dim=128, vocab_size=151936,
        use_sliding_window=False, sliding_window=None, num_experts_per_tok=8,
    ),
    "smollm3-3b": _said(
        "smollm3", 2048, 36, 16, 4, 65536, vocab_size=128256, use_sliding_window=False,
        sliding_window=None, no_rope_layers=[1, 1, 1, 0] * 9,
        layer_types=["full_attention"] * 36,
    ),
    "mistral-7b-v0.1": _said(
        "mistral", 4096, 32, 32, 8, 32768, vocab_size=32000, sliding_window=4096
    ),
    "phi-3-mini-4k": _said("phi3", 3072, 32, 32, 32, 4096, vocab_size=32064, sliding_window=2047),
    "gemma-2-9b": _said(
        "gemma2", 3584, 42, 16, 8, 8192, head_dim=256, vocab_size=256000, sliding_window=4096,
        attn_logit_softcapping=50.0,
    ),
    # says little: its class fills in 8 heads, 4 KV heads of 256 values, 131072 positions
    "gemma-3-4b": {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
            "num_hidden_layers": 34, "sliding_window": 1024,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
        "vision_config": {"model_type": "siglip_vision_model", "num_hidden_layers": 27},
    },
    "gpt-oss-20b": _said(
        "gpt_oss", 2880, 24, 64, 8, 131072, head_dim=64, vocab_size=201088, sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 12, num_experts_per_tok=4,
    ),
    "qwen3-next-80b-a3b": _said(
        "qwen3_next", 2048, 48, 16, 2, 262144, head_dim=256, vocab_size=151936,
        **(_LINEAR | {"num_experts_per_tok": 10}),
    ),
    "qwen3.5-35b-a3b": {
        "model_type": "qwen3_5_moe",
        "text_config": _said(
            "qwen3_5_moe_text", 2048, 40, 16, 2, 262144, head_dim=256, vocab_size=248320,
            layer_types=([*["linear_attention"] * 3, "full_attention"]) * 10, **_LINEAR,
        ),
    },
    "deepseek-v3": _said(
        "deepseek_v3", 7168, 61, 128, 128, 163840, vocab_size=129280, kv_lora_rank=512,
        qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, num_nextn_predict_layers=1,
    ),
    "deepseek-v3.2": _said(
        "deepseek_v32", 7168, 61, 128, 128, 163840, vocab_size=129280, kv_lora_rank=512,
        qk_rope_head_dim=64, index_head_dim=128, index_n_heads=64, index_topk=2048,
    ),
    # 11 of 45 layers run an indexer of their own
    "glm-shared-indexers": _said(
        "glm_moe_dsa", 6144, 45, 64, 64, 202752, vocab_size=154880, kv_lora_rank=512,
        qk_rope_head_dim=64, index_head_dim=128, index_topk=2048,
        indexer_types=["full", *(["shared"] * 3 + ["full"]) * 10, *["shared"] * 4],
    ),
    "qwen4-exp": {
        "model_type": "qwen4_exp",
        "text_config": _said(
            "qwen4_exp_text", 2048, 48, 16, 2, 2097152, head_dim=256, vocab_size=248320,
            indexer_n_heads=16, indexer_kv_heads=1, indexer_head_dim=128, indexer_budget=2048,
            indexer_compress_ratio=4, **_LINEAR,
        ),
    },
}  # fmt: skip
