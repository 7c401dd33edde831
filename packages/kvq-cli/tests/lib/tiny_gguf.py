"""GGUF files of a few thousand parameters, one of each architecture that is converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

LAYERS, WIDTH, HEADS, KV_HEADS, INNER, NUM_WORDS = 7, 64, 4, 2, 96, 64
# Values that transformers' own reader takes for granted, so that it can be compared with.
DIMS = {"llama": 16, "qwen2": 16, "qwen3": 128, "phi3": 16, "gemma2": 256, "gemma3": 256}
OWN_FIELDS = {
    "gemma2": {"attention.sliding_window": 16},
    "gemma3": {"attention.sliding_window": 16},
}


def tensors(architecture: str) -> dict[str, np.ndarray]:
    """Random values under llama.cpp's names; norms near one, as in trained models."""
    rng = np.random.default_rng(7)
    return {
        name: (rng.standard_normal(shape) * 0.1 + ("norm" in name)).astype(np.float32)
        for name, shape in _shapes(architecture).items()
    }


def write(
    path: Path,
    architecture: str,
    *,
    values: dict[str, np.ndarray] | None = None,
    fields: dict[str, Any] | None = None,
) -> Path:
    """Write a file; a field given as None is left out."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    dim = DIMS.get(architecture, 16)
    settings = {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": WIDTH,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": dim,
        "attention.value_length": dim,
        "rope.dimension_count": dim,
        "rope.freq_base": 10000.0,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **OWN_FIELDS.get(architecture, {}),
        **(fields or {}),
    }
    for key, value in settings.items():
        if isinstance(value, str):
            writer.add_string(f"{architecture}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{architecture}.{key}", value)
        elif value is not None:
            writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(NUM_WORDS - 3))])
    writer.add_token_scores([-float(i) for i in range(NUM_WORDS)])
    writer.add_token_types([2, 3, 3, *[1] * (NUM_WORDS - 3)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    for name, data in (tensors(architecture) if values is None else values).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _shapes(architecture: str) -> dict[str, tuple[int, ...]]:
    dim = DIMS[architecture]
    wide, narrow = HEADS * dim, KV_HEADS * dim
    gemma = architecture.startswith("gemma")
    block: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (WIDTH,),
        "attn_output.weight": (WIDTH, wide),
        "ffn_norm.weight": (WIDTH,),
        "ffn_down.weight": (WIDTH, INNER),
    }
    if architecture == "phi3":
        block["attn_qkv.weight"] = (wide + 2 * narrow, WIDTH)
        block["ffn_up.weight"] = (2 * INNER, WIDTH)
    else:
        for name, rows in (("q", wide), ("k", narrow), ("v", narrow)):
            block[f"attn_{name}.weight"] = (rows, WIDTH)
            if architecture == "qwen2":
                block[f"attn_{name}.bias"] = (rows,)
        block["ffn_gate.weight"] = block["ffn_up.weight"] = (INNER, WIDTH)
    if architecture in ("qwen3", "gemma3"):
        block["attn_q_norm.weight"] = block["attn_k_norm.weight"] = (dim,)
    if gemma:
        block["post_attention_norm.weight"] = block["post_ffw_norm.weight"] = (WIDTH,)
    ends: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (NUM_WORDS, WIDTH),
        "output_norm.weight": (WIDTH,),
    }
    if not gemma:
        ends["output.weight"] = (NUM_WORDS, WIDTH)
    layers = {f"blk.{i}.{name}": shape for i in range(LAYERS) for name, shape in block.items()}
    return ends | layers
