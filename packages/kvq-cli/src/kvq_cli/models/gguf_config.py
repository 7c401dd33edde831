"""GGUF metadata to a transformers config: one function an architecture says what differs.

transformers, which imports torch, is imported only where a config of its own is made.

What the file says and transformers' own GGUF reader ignores (a rope scaling, soft caps, the query
scale of the largest Gemmas) is either translated or refused, never dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from kvq_cli.models.gguf_file import GgufError, GgufFile

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

EMBEDDING = "token_embd.weight"
ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def hf_config(file: GgufFile) -> PreTrainedConfig:
    """The config of the model in `file`; no weights are read. Raises as `settings`."""
    from transformers import AutoConfig

    config: PreTrainedConfig = AutoConfig.for_model(**settings(file))
    return config


def settings(file: GgufFile) -> dict[str, Any]:
    """The model in `file` as a config.json would describe it.

    Raises
    ------
    GgufError : an architecture or an option that is not converted
    """
    if file.architecture not in _ARCHITECTURES:
        raise GgufError(
            f"{file.path.name} holds architecture {file.architecture!r}; GGUF files of "
            f"{', '.join(_ARCHITECTURES)} are converted. "
            "Use the model's safetensors directory instead"
        )
    parts = file.metadata.get("split.count") or 1
    if parts > 1:
        raise GgufError(
            f"{file.path.name} is one of {parts} parts of a model; "
            "join them with llama.cpp's llama-gguf-split --merge"
        )
    if file.field("expert_count"):
        raise GgufError(
            f"{file.path.name} holds a mixture of experts, which is not converted from GGUF; "
            "use the model's safetensors directory instead"
        )
    model_type, own = _ARCHITECTURES[file.architecture]
    return {"model_type": model_type, **_common(file), **own(file)}


def stop_token_ids(file: GgufFile) -> list[int]:
    """Tokens that end a text or a turn."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = (file.metadata.get(f"tokenizer.ggml.{key}") for key in keys)
    return sorted({token for token in found if token is not None})


def head_dim(file: GgufFile) -> int:
    """Values a head; checked against the rotary width, which must be the whole head."""
    width = _required(file, "embedding_length") // _required(file, "attention.head_count")
    dim = int(file.field("attention.key_length") or width)
    for key in ("attention.value_length", "rope.dimension_count"):
        other = file.field(key)
        if other not in (None, dim):
            raise GgufError(f"{file.path.name}: {key} {other} differs from head_dim {dim}")
    return dim


def _required(file: GgufFile, key: str) -> int:
    value = file.field(key)
    if not isinstance(value, int):
        raise GgufError(
            f"{file.path.name}: {file.architecture}.{key} is {value!r}, one integer is needed"
        )
    return value


def _common(file: GgufFile) -> dict[str, Any]:
    stops = stop_token_ids(file)
    if EMBEDDING not in file.tensors:
        raise GgufError(f"{file.path.name} has no {EMBEDDING}: it holds no language model")
    heads = _required(file, "attention.head_count")
    return {
        "num_hidden_layers": _required(file, "block_count"),
        "hidden_size": _required(file, "embedding_length"),
        "intermediate_size": _required(file, "feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.field("attention.head_count_kv") or heads,
        "head_dim": head_dim(file),
        "max_position_embeddings": _required(file, "context_length"),
        "rms_norm_eps": float(file.field("attention.layer_norm_rms_epsilon") or 1e-6),
        "vocab_size": file.tensors[EMBEDDING].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": stops if len(stops) > 1 else next(iter(stops), None),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
        "rope_parameters": _rope(file),
    }


def _rope(file: GgufFile, default_theta: float = 10000.0) -> dict[str, Any]:
    theta = float(file.field("rope.freq_base") or default_theta)
    kind = file.field("rope.scaling.type") or "none"
    if kind not in ("none", "linear"):
        raise GgufError(
            f"{file.path.name}: rope scaling {kind!r} is not converted from GGUF (linear is); "
            "use the model's safetensors directory instead"
        )
    factor = float(file.field("rope.scaling.factor") or 1.0)
    if kind == "linear" and factor != 1.0:
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    return {"rope_type": "default", "rope_theta": theta}


def _llama(file: GgufFile) -> dict[str, Any]:
    rope = _rope(file)
    if ROPE_FACTORS not in file.tensors:
        return {"rope_parameters": rope}
    # Llama 3.1 and later store what their rope scaling does to each frequency, not its settings.
    stored = file.values(ROPE_FACTORS)
    for factor in (8.0, 32.0):
        if np.allclose(stored, _llama3_factors(rope["rope_theta"], factor, head_dim(file))):
            scaling = {**_LLAMA3_ROPE, "rope_type": "llama3", "factor": factor}
            return {"rope_parameters": {**rope, **scaling}}
    raise GgufError(
        f"{file.path.name}: its rope factors are not those of Llama 3.1 to 3.3; "
        "use the model's safetensors directory instead"
    )


def _llama3_factors(theta: float, factor: float, dim: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What divides each rotary frequency: 1 for the fast ones, `factor` for the slow ones."""
    low, high, length = _LLAMA3_ROPE.values()
    wavelength = 2 * np.pi * theta ** (np.arange(0, dim, 2) / dim)
    fast = np.clip((length / wavelength - low) / (high - low), 0.0, 1.0)
    blend: np.ndarray[Any, np.dtype[np.float64]] = 1.0 / ((1.0 - fast) / factor + fast)
    return blend


def _qwen(file: GgufFile) -> dict[str, Any]:
    return {"use_sliding_window": False}


def _phi3(file: GgufFile) -> dict[str, Any]:
    return {"sliding_window": file.field("attention.sliding_window") or None}


def _gemma2(file: GgufFile) -> dict[str, Any]:
    return {
        "sliding_window": _required(file, "attention.sliding_window"),
        "attn_logit_softcapping": float(file.field("attn_logit_softcapping") or 50.0),
        "final_logit_softcapping": float(file.field("final_logit_softcapping") or 30.0),
        "query_pre_attn_scalar": _query_scale(file, widest=46),
    }


def _gemma3(file: GgufFile) -> dict[str, Any]:
    local = float(file.field("rope.freq_base_swa") or 10000.0)
    return {
        "sliding_window": _required(file, "attention.sliding_window"),
        "query_pre_attn_scalar": _query_scale(file, widest=62),
        "rope_parameters": {
            "full_attention": _rope(file, default_theta=1e6),
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


def _query_scale(file: GgufFile, widest: int) -> int:
    """Gemma's 27B models (known by their depth) scale queries by the width a head would have."""
    if _required(file, "block_count") != widest:
        return head_dim(file)
    return _required(file, "embedding_length") // _required(file, "attention.head_count")


_ARCHITECTURES: dict[str, tuple[str, Callable[[GgufFile], dict[str, Any]]]] = {
    "llama": ("llama", _llama),
    "qwen2": ("qwen2", _qwen),
    "qwen3": ("qwen3", _qwen),
    "phi3": ("phi3", _phi3),
    "gemma2": ("gemma2", _gemma2),
    "gemma3": ("gemma3_text", _gemma3),
}
