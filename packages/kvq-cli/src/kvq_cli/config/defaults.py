"""What each family's config class of transformers fills in where a config.json is silent.

Only the keys that the cache and its workspace depend on. Importing transformers for them would
import torch; a test holds them against its classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _sizes(
    vocabulary: int, hidden: int, feed_forward: int, layers: int, heads: int, kv_heads: int | None,
    head_dim: int | None, positions: int, eos: int | None, **others: Any,
) -> Mapping[str, Any]:  # fmt: skip
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": positions,
        "eos_token_id": eos,
        **others,
    }


def _experts(width: int, per_token: int, shared: int = 0) -> dict[str, int]:
    return {
        "moe_intermediate_size": width,
        "num_experts_per_tok": per_token,
        "shared_expert_intermediate_size": shared,
    }


_OPTIONAL_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_LINEAR = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
}
_LATENT = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
}
_INDEX = {"index_head_dim": 128}

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": _sizes(32000, 4096, 11008, 32, 32, None, None, 2048, 2),
    "smollm3": _sizes(
        128256, 2048, 11008, 36, 16, 4, None, 32768, 128001,
        use_sliding_window=False, sliding_window=None, no_rope_layer_interval=4,
    ),
    "mistral": _sizes(32000, 4096, 14336, 32, 32, 8, None, 131072, 2, sliding_window=4096),
    "qwen2": _sizes(
        151936, 4096, 22016, 32, 32, 32, None, 32768, None, **_OPTIONAL_WINDOW
    ),
    "qwen2_moe": _sizes(
        151936, 2048, 5632, 24, 16, 16, None, 32768, None,
        **_OPTIONAL_WINDOW, **_experts(1408, 4, 5632),
    ),
    "qwen3": _sizes(151936, 4096, 22016, 32, 32, 32, 128, 32768, None, **_OPTIONAL_WINDOW),
    "qwen3_moe": _sizes(
        151936, 2048, 6144, 24, 32, 4, None, 32768, None,
        use_sliding_window=False, sliding_window=4096, **_experts(768, 8),
    ),
    "gemma2": _sizes(
        256000, 2304, 9216, 26, 8, 4, 256, 8192, 1,
        sliding_window=4096, attn_logit_softcapping=50.0,
    ),
    "gemma3_text": _sizes(
        262208, 2304, 9216, 26, 8, 4, 256, 131072, 1,
        sliding_window=4096, sliding_window_pattern=6,
    ),
    "gpt_oss": _sizes(
        201088, 2880, 2880, 36, 64, 8, 64, 131072, None,
        sliding_window=128, num_experts_per_tok=4,
    ),
    "phi3": _sizes(32064, 3072, 8192, 32, 32, None, None, 4096, 32000, sliding_window=None),
    "olmo2": _sizes(50304, 4096, 11008, 32, 32, None, None, 2048, 50279),
    "granite": _sizes(32000, 4096, 11008, 32, 32, None, None, 2048, 2),
    "gemma4_text": _sizes(
        262144, 2304, 9216, 30, 8, 4, 256, 131072, 1,
        sliding_window=512, global_head_dim=512, num_kv_shared_layers=0,
    ),
    "qwen3_next": _sizes(
        151936, 2048, 5632, 48, 16, 2, 256, 32768, None, **_LINEAR, **_experts(512, 10, 512)
    ),
    "qwen3_5_text": _sizes(248320, 4096, 12288, 32, 16, 4, 256, 32768, None, **_LINEAR),
    "qwen3_5_moe_text": _sizes(
        248320, 2048, 0, 40, 16, 2, 256, 32768, None, **_LINEAR, **_experts(512, 8, 512)
    ),
    "qwen4_exp_text": _sizes(
        248320, 2048, 0, 40, 16, 2, 256, 32768, None, **_LINEAR, **_experts(512, 10, 512)
    ),
    "deepseek_v3": _sizes(129280, 7168, 18432, 61, 128, 128, None, 4096, 1, **_LATENT),
    "deepseek_v32": _sizes(
        129280, 7168, 18432, 61, 128, 128, None, 163840, 1, **_LATENT, **_INDEX
    ),
    "glm_moe_dsa": _sizes(
        154880, 6144, 12288, 78, 64, 64, None, 202752, 1, **_LATENT, **_INDEX,
        index_topk_freq=1, index_skip_topk_offset=2,
    ),
}  # fmt: skip
