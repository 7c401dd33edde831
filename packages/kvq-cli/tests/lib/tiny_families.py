"""A random model of a few thousand parameters of each family, and of its kinds, that is served."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import LAYERS_4_2, SMALL, WINDOW
from transformers import AutoConfig, AutoModelForCausalLM

POSITIONS = 1024
BASE: dict[str, Any] = {**SMALL, **LAYERS_4_2, "max_position_embeddings": POSITIONS}
WIDE: dict[str, Any] = {"head_dim": 32}
FOUR: dict[str, Any] = {"num_hidden_layers": 4}
SLIDES: dict[str, Any] = {"sliding_window": WINDOW}
SOME_SLIDE: dict[str, Any] = {**SLIDES, "use_sliding_window": True, "max_window_layers": 1}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}

LINEAR: dict[str, Any] = {
    **FOUR,
    **WIDE,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}

# name → (model type, what its config says beside BASE)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, one key/value head each": ("llama", {"num_key_value_heads": 4}),
    "smollm": ("llama", {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "smollm3": ("smollm3", FOUR),
    "smollm3, windows": ("smollm3", FOUR | SOME_SLIDE),
    "mistral": ("mistral", {"sliding_window": None} | WIDE),
    "mistral, windows": ("mistral", SLIDES | WIDE),
    "qwen2": ("qwen2", {}),
    "qwen2, windows": ("qwen2", SOME_SLIDE),
    "qwen2_moe": ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 32}),
    "qwen3": ("qwen3", WIDE),
    "qwen3_moe": ("qwen3_moe", EXPERTS | WIDE),
    "gemma2": (
        "gemma2",
        FOUR | SLIDES | WIDE
        | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0,
           "query_pre_attn_scalar": 24},
    ),
    "gemma3": (
        "gemma3_text",
        FOUR | SLIDES | WIDE
        | {"layer_types": ["sliding_attention", "full_attention"] * 2,
           "query_pre_attn_scalar": 24},
    ),
    "gpt_oss": (
        "gpt_oss",
        FOUR | SLIDES | WIDE
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
    ),
    "phi3": ("phi3", {}),
    "phi3, windows": ("phi3", SLIDES),
    "olmo2": ("olmo2", {}),
    "granite": (
        "granite",
        {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "embedding_multiplier": 2.0,
         "logits_scaling": 4.0},
    ),
    "qwen3_next": ("qwen3_next", LINEAR | EXPERTS | {"shared_expert_intermediate_size": 32}),
    "qwen3_5": ("qwen3_5_text", LINEAR),
    "qwen3_5_moe": (
        "qwen3_5_moe_text", LINEAR | EXPERTS | {"shared_expert_intermediate_size": 32}
    ),
}  # fmt: skip


def tiny(family: str, **changes: Any) -> Any:
    """Its model, with its config changed as asked, in eval mode; the same weights each time."""
    model_type, settings = FAMILIES[family]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(BASE | settings | changes))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("sinks", "bias")):
                weight.normal_()  # which transformers may leave at zero
    return model.eval()
