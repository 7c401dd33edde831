"""Rotary embeddings whose frequencies would depend on what else is computed in a step."""

from __future__ import annotations

from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LONGROPE, DYNAMIC = "longrope", "dynamic"
_FIXED = "default"  # what transformers calls frequencies that stay as they are


def settle(model: Any, context: int) -> None:
    """Give a longrope or dynamic model the frequencies of its longest request, for all requests.

    transformers chooses them at each call, by the furthest position in it. A step holds tokens of
    several requests, and cached keys were rotated by earlier steps: both must agree. To choose it
    reads that position on the host, too, which no CUDA graph can.

    Parameters
    ----------
    context : most tokens of a request
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, dict):
            for layer_type, kind in kinds.items():
                if kind in (LONGROPE, DYNAMIC):
                    _settle(module, f"{layer_type}_inv_freq", kind, context, layer_type)
            module.rope_type = {name: _settled(kind) for name, kind in kinds.items()}
        elif kinds in (LONGROPE, DYNAMIC):
            _settle(module, "inv_freq", kinds, context, None)
            module.rope_type = _settled(kinds)


def _settled(kind: str) -> str:
    return _FIXED if kind in (LONGROPE, DYNAMIC) else kind


def _settle(module: Any, buffer: str, kind: str, context: int, layer_type: str | None) -> None:
    held = getattr(module, buffer)
    compute: Any = ROPE_INIT_FUNCTIONS[kind]
    frequencies, _ = compute(module.config, held.device, seq_len=context, layer_type=layer_type)
    held.copy_(frequencies)
