"""Rotary embeddings whose frequencies would depend on what else is computed in a step."""

from __future__ import annotations

from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LONGROPE = "longrope"
_FIXED = "default"  # what transformers calls frequencies that stay as they are


def settle(model: Any, context: int) -> None:
    """Give a longrope model the frequencies of its longest request, for all requests.

    transformers takes one of two sets at each call, by the furthest position in it. A step holds
    tokens of several requests, and cached keys were rotated by earlier steps: both must agree.

    Parameters
    ----------
    context : most tokens of a request
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if kinds == LONGROPE:
            _settle(module, "inv_freq", context, None)
            module.rope_type = _FIXED
        elif isinstance(kinds, dict):
            for layer_type in [name for name, kind in kinds.items() if kind == LONGROPE]:
                _settle(module, f"{layer_type}_inv_freq", context, layer_type)
            module.rope_type = {
                name: _FIXED if kind == LONGROPE else kind for name, kind in kinds.items()
            }


def _settle(module: Any, buffer: str, context: int, layer_type: str | None) -> None:
    held = getattr(module, buffer)
    compute: Any = ROPE_INIT_FUNCTIONS[LONGROPE]
    frequencies, _ = compute(module.config, held.device, seq_len=context, layer_type=layer_type)
    held.copy_(frequencies)
