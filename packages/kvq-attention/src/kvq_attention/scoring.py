"""How the scores of an attention call are made: scale, window, soft cap, sinks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvq_attention.errors import AttentionError


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """softmax over the visible positions of cap(scale · q·k), beside a sink per head.

    Attributes
    ----------
    scale : factor of q·k
    window : positions that a query sees, its own included, ending with its own; None = all
    softcap : scores s become softcap · tanh(s / softcap); None = as they are
    sinks : float [Hq], a logit per head that joins the softmax's denominator only; None = no sink
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise AttentionError(f"scale must be a finite number, got {self.scale}")
        if self.window is not None and self.window < 1:
            raise AttentionError(
                f"window counts the query's own position, so it is at least 1; got {self.window} "
                "(None = every earlier position)"
            )
        if self.softcap is not None and not (math.isfinite(self.softcap) and self.softcap > 0):
            raise AttentionError(
                f"softcap must be a positive finite number, got {self.softcap} (None = no cap)"
            )

    @property
    def features(self) -> frozenset[str]:
        """The optional parts in use, as SUPPORT names them."""
        parts = {"window": self.window, "softcap": self.softcap, "sinks": self.sinks}
        return frozenset(name for name, value in parts.items() if value is not None)

    def first_visible(self, position: int) -> int:
        """The first position that a query at `position` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)
