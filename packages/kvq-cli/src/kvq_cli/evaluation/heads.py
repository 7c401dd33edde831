"""The last step of a model, from hidden states to logits, on its own.

A reference's logits for a long text are larger than the model: its hidden states are kept, a
hundredth of that, and become logits again when they are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.modeling_outputs import MoeModelOutputWithPast


@contextmanager
def watched(model: Any) -> Iterator[list[torch.Tensor]]:
    """A list that grows by the hidden states [T, hidden] of each call, on the host."""
    seen: list[torch.Tensor] = []
    handle = model.base_model.register_forward_hook(
        lambda module, inputs, output: seen.append(output.last_hidden_state[0].cpu())
    )
    try:
        yield seen
    finally:
        handle.remove()


@torch.inference_mode()
def logits(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """What the model makes of hidden states [T, hidden] that it had: logits [T, vocabulary].

    The model's own code runs, with what some do to logits afterwards; only the layers before its
    head answer with what they answered then.
    """
    known = MoeModelOutputWithPast(last_hidden_state=hidden[None].to(model.device))
    model.base_model.forward = lambda *args, **kwargs: known
    try:
        found: torch.Tensor = model(
            input_ids=torch.zeros(1, len(hidden), dtype=torch.long, device=model.device),
            use_cache=False,
        ).logits[0]
    finally:
        del model.base_model.forward  # the class's own again
    return found
