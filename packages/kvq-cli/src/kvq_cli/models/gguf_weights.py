"""GGUF tensors to transformers parameters: names, and how llama.cpp stores the values."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from transformers import AutoModelForCausalLM, PreTrainedConfig

from kvq_cli.models.gguf_config import ROPE_FACTORS
from kvq_cli.models.gguf_file import GgufError, GgufFile

Values = np.ndarray[Any, np.dtype[np.float32]]
_SUFFIXES = (".weight", ".bias")


def parameter_places(file: GgufFile, config: PreTrainedConfig) -> dict[str, str]:
    """Each parameter's name in transformers and its tensor in the file.

    Raises
    ------
    GgufError : a parameter without a tensor, a tensor without a parameter, or another shape
    """
    with torch.device("meta"):
        build: Any = AutoModelForCausalLM.from_config
        model = build(config)
    architecture = next(a for a, name in MODEL_ARCH_NAMES.items() if name == file.architecture)
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    tied = set(model.all_tied_weights_keys)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if name not in tied}
    places = {name: names.get_name(name, try_suffixes=_SUFFIXES) or name for name in shapes}
    missing = sorted(name for name, place in places.items() if place not in file.tensors)
    if missing:
        raise GgufError(f"{file.path.name} lacks {len(missing)} tensors, {missing[0]} among them")
    extra = sorted(file.tensors.keys() - set(places.values()) - {ROPE_FACTORS})
    if extra:
        raise GgufError(
            f"{file.path.name} holds {len(extra)} tensors that a {config.model_type} model has no "
            f"place for, {extra[0]} among them; use the model's safetensors directory instead"
        )
    for name, place in places.items():
        if file.tensors[place].shape != shapes[name]:
            raise GgufError(
                f"{file.path.name}: {place} has shape {file.tensors[place].shape}, "
                f"{shapes[name]} is needed"
            )
    return places


def parameter(file: GgufFile, config: PreTrainedConfig, name: str, place: str) -> Values:
    """The values of one parameter as transformers' modules want them."""
    values = file.values(place)
    if file.architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        return _halves_from_pairs(values, config.head_dim)
    if file.architecture.startswith("gemma") and name.endswith("norm.weight"):
        return values - 1  # llama.cpp multiplies by w, transformers by 1 + w
    return values


def _halves_from_pairs(values: Values, head_dim: int) -> Values:
    """Reorder a head's rows: llama.cpp rotates neighbours, transformers a half with the other."""
    heads = values.shape[0] // head_dim
    pairs = values.reshape(heads, head_dim // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
