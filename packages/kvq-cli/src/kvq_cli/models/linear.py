"""Linear-attention layers of a transformers model over packed tokens of several requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

Copies = Callable[[int], tuple[torch.Tensor, torch.Tensor]]


@dataclass(slots=True)
class Part:
    """Requests that are computed at once; to the layers' modules it is transformers' cache.

    It computes on copies: what a step makes of them is kept by whoever began it.

    Attributes
    ----------
    rows : of the step's tokens
    copies : layer → a convolution's inputs [n, channels, tokens] and matrices [n, heads, key_dim,
        value_dim] of its n requests; None before their first token
    together : n tokens of n requests; else all rows are of one request
    made : layer → what the step makes of them
    """

    rows: slice
    copies: Copies | None
    together: bool = False
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    _conv: torch.Tensor | None = None
    _matrix: torch.Tensor | None = None

    def compute(
        self, layer: int, hidden: torch.Tensor, forward: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        """A layer's rows [1, T, hidden] by its module's own `forward`."""
        self._conv, self._matrix = (None, None) if self.copies is None else self.copies(layer)
        tokens = hidden[:, self.rows]
        if self.together:
            return forward(tokens.transpose(0, 1), cache=self).transpose(0, 1)
        return forward(tokens, cache=self)

    def get_conv_state(self, layer: int, state_idx: int = 0) -> torch.Tensor | None:
        """The convolution's inputs; a module may shift them in place."""
        return self._conv

    def get_recurrent_state(self, layer: int, state_idx: int = 0) -> torch.Tensor | None:
        """The matrices."""
        return self._matrix

    def is_recording_past(self, layer: int) -> bool:
        """No: nothing is taken back."""
        return False

    def update_conv_state(
        self, inputs: torch.Tensor, layer: int, *, conv_kernel_size: int, **_: Any
    ) -> torch.Tensor:
        """The inputs behind those before them, whose last `conv_kernel_size` are kept."""
        if self._conv is not None:
            inputs = torch.cat([self._conv, inputs], dim=-1)
        elif inputs.shape[-1] < conv_kernel_size:
            inputs = torch.nn.functional.pad(inputs, (conv_kernel_size - inputs.shape[-1], 0))
        self._conv = inputs[..., -conv_kernel_size:].clone()  # not a view that holds them all
        return inputs

    def update_recurrent_state(self, matrix: torch.Tensor, layer: int, **_: Any) -> torch.Tensor:
        """The last thing that a module says."""
        assert self._conv is not None
        self.made[layer] = self._conv, matrix
        return matrix


@dataclass(slots=True)
class StaticPart(Part):
    """A part that a graph computes: what it makes goes to where it stays.

    Attributes
    ----------
    index : layer → its place in `inputs` and `matrices`
    inputs, matrices : [layers, n or more, …], written in place
    """

    index: Mapping[int, int] = field(default_factory=dict)
    inputs: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    matrices: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def update_recurrent_state(self, matrix: torch.Tensor, layer: int, **_: Any) -> torch.Tensor:
        """The last thing that a module says."""
        assert self._conv is not None
        for stays, new in ((self.inputs, self._conv), (self.matrices, matrix)):
            stays[self.index[layer], : len(new)].copy_(new)
        self._conv = self._matrix = None
        return matrix


def install(model: Any) -> None:
    """Make linear-attention layers compute each request of a step from a state of its own."""
    for module in model.modules():
        if type(module).__name__.endswith("GatedDeltaNet") and "forward" not in vars(module):
            module.forward = partial(_forward, module, module.forward)


def _forward(
    module: Any,
    own: Callable[..., torch.Tensor],
    hidden_states: torch.Tensor,
    *,
    kvq_step: Any = None,
    **given: Any,
) -> torch.Tensor:
    if kvq_step is None:  # transformers itself calls the model
        return own(hidden_states, **given)
    parts = kvq_step.states
    return torch.cat([p.compute(module.layer_idx, hidden_states, own) for p in parts], dim=1)
