"""From a config.json to a `ModelGeometry`; `layers` and `defaults` know the other key names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvq_cli.config.defaults import DEFAULTS
from kvq_cli.config.errors import ConfigError, UnsupportedModel
from kvq_cli.config.geometry import ModelGeometry
from kvq_cli.config.layers import FAMILIES, Keys, count, whole
from kvq_cli.config.rotary import short_positions
from kvq_cli.quoting import in_json

# Families that `kvq serve` runs: each is compared with transformers' own attention calls.
SERVED = (
    "llama", "smollm3", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma2",
    "gemma3_text", "gpt_oss", "phi3", "olmo2", "granite", "qwen3_next", "qwen3_5_text",
    "qwen3_5_moe_text",
)  # fmt: skip
# Families that `kvq plan` knows.
PLANNED = tuple(DEFAULTS)

# What a multimodal config calls itself, and what its text part is.
_TEXT_TYPES = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen4_exp": "qwen4_exp_text",
}

# An unknown model whose config has one of these keys (not None) has more than a plain cache.
_FOREIGN_KEYS = {
    "kv_lora_rank": "latent attention (MLA), which caches one compressed vector a token",
    "linear_num_value_heads": "linear-attention layers, which keep a state instead of a cache",
    "state_size": "state-space layers, which keep a state instead of a cache",
    "mamba_d_state": "state-space layers, which keep a state instead of a cache",
    "index_topk": "sparse attention, which needs a cache of index keys too",
}


def geometry(config: Keys) -> ModelGeometry:
    """The geometry of a config.json (or of transformers' `config.to_dict()`).

    A multimodal model gives that of its text part.

    Raises
    ------
    UnsupportedModel : with the reason and the known families
    ConfigError : a setting that is not what it should be
    """
    if config.get("is_encoder_decoder"):
        raise _refused(config, "an encoder-decoder model has cross-attention caches")
    text = _text_part(config)
    model_type = text["model_type"]
    if model_type not in DEFAULTS:
        for key, reason in _FOREIGN_KEYS.items():
            if text.get(key) is not None:
                raise _refused(text, f"it has {reason}")
        raise _refused(text, "this family has not been proved to work")
    if text.get("use_bidirectional_attention") in (True, "all"):
        raise _refused(text, "its attention looks ahead, so earlier keys and values change")
    try:
        return ModelGeometry(**_facts({**DEFAULTS[model_type], **text}))
    except (TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise ConfigError(
            f"{model_type}: a setting is of a kind that is not understood "
            f"({type(error).__name__}: {error}); compare it with the model's own config.json"
        ) from error


def _facts(keys: Keys) -> dict[str, Any]:
    """The fields of `ModelGeometry`."""
    model_type = keys["model_type"]
    heads = whole(keys, "num_attention_heads")
    return {
        "model_type": model_type,
        "num_layers": whole(keys, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": whole(keys, "num_key_value_heads", heads),
        "head_dim": _head_dim(keys, heads),
        "hidden_size": whole(keys, "hidden_size"),
        "vocab_size": whole(keys, "vocab_size"),
        "max_position": whole(keys, "max_position_embeddings"),
        "softcap": keys.get("attn_logit_softcapping"),
        "has_sinks": model_type == "gpt_oss",
        "eos_token_ids": token_ids(keys["eos_token_id"]),
        "short_positions": short_positions(keys),
        **_feed_forward(keys),
        **FAMILIES[model_type](keys),
    }


def _head_dim(keys: Keys, heads: int) -> int:
    hidden = whole(keys, "hidden_size")
    if keys.get("head_dim") is None and heads > hidden:
        raise ConfigError(
            f"{keys['model_type']}: num_attention_heads {in_json(heads)} is more than hidden_size "
            f"{hidden:,}, which the heads divide where no head_dim is given"
        )
    return whole(keys, "head_dim", hidden // heads)


def filled_in(config: Keys) -> dict[str, int]:
    """What sizes a cache most and a config is silent on, as its family's defaults have it.

    `config` is one that `geometry` understands.
    """
    text = _text_part(config)
    keys = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size")
    defaults = DEFAULTS[text["model_type"]]
    return {k: defaults[k] for k in keys if k not in text and defaults[k] is not None}


def check_servable(model: ModelGeometry) -> None:
    """Raise `UnsupportedModel`, with the reason, for a model that `kvq serve` cannot run."""
    keys = {"model_type": model.model_type}
    if model.latent is not None:
        raise _unserved(keys, f"it has {_FOREIGN_KEYS['kv_lora_rank']}")
    if model.index is not None:
        raise _unserved(keys, f"it has {_FOREIGN_KEYS['index_topk']}")
    if model.model_type not in SERVED:
        raise _unserved(keys, "this family has not been proved to work")
    if model.model_type == "qwen2_moe" and model.window is not None:
        # transformers' module tells its mask of the window but not its attention function
        raise _unserved(keys, "with a sliding window it hides the window from its attention")


def token_ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    """Token ids as configs hold them: none, one or several."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _text_part(config: Keys) -> Keys:
    nested = config.get("text_config")
    outer = config.get("model_type")
    if "text_config" in config and not isinstance(nested, Mapping):
        raise ConfigError(
            f"{outer}: text_config must be an object with the settings of the text part, "
            f"got {in_json(nested)}; compare it with the model's own config.json"
        )
    text = config if nested is None else nested
    model_type = text.get("model_type") or outer
    if not isinstance(model_type, str):
        raise ConfigError(
            "the config names no model_type, which says what its other keys mean; "
            f"known are {', '.join(PLANNED)}"
        )
    return {**text, "model_type": _TEXT_TYPES.get(model_type, model_type)}


def _feed_forward(keys: Keys) -> dict[str, int]:
    """Width of the widest feed-forward part, all experts of a token together."""
    dense = count(keys, "intermediate_size")
    experts = count(keys, "num_experts_per_tok")
    width = count(keys, "moe_intermediate_size") or dense
    shared = count(keys, "shared_expert_intermediate_size")
    shared += count(keys, "n_shared_experts") * width
    return {
        "feed_forward": max(dense, experts * width + shared),
        "experts_per_token": experts,
    }


def _refused(keys: Keys, reason: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"model type {keys.get('model_type')!r} is not supported: {reason}. "
        f"Supported: {', '.join(PLANNED)}"
    )


def _unserved(keys: Keys, reason: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"model type {keys['model_type']!r} is not served: {reason}. Served: {', '.join(SERVED)}"
    )
