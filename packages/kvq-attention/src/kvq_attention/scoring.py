"""How the scores of an attention call are made: scale, window, soft cap, sinks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvq_attention.errors import AttentionError

# Scores are float32: what lies beyond would be infinite there, or a 0 to divide by.
SMALLEST, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
WIDEST = torch.iinfo(torch.int64).max


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """softmax over the visible positions of cap(scale · q·k), beside a sink per head.

    Attributes
    ----------
    scale : factor of q·k
    window : positions that a query sees, its own included, ending with its own; None = all
    softcap : scores s become softcap · tanh(s / softcap); None = as they are
    sinks : float [Hq], a logit per head that joins the softmax's denominator only; None = no sink

    Raises `AttentionError` for numbers of the wrong kind or beyond float32.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if not _within(self.scale, -LARGEST, LARGEST):
            raise AttentionError(
                f"scale must be a number in ±{LARGEST:.4g} (float32), got {self.scale!r}"
            )
        if self.window is not None and not (
            type(self.window) is int and 1 <= self.window <= WIDEST
        ):
            raise AttentionError(
                "window counts the query's own position, so it must be an int of 1 … 2**63 - 1, "
                f"got {self.window!r} (None = every earlier position)"
            )
        if self.softcap is not None and not _within(self.softcap, SMALLEST, LARGEST):
            raise AttentionError(
                f"softcap must be a number of {SMALLEST:.4g} … {LARGEST:.4g} (float32), "
                f"got {self.softcap!r} (None = no cap)"
            )

    @property
    def features(self) -> frozenset[str]:
        """The optional parts in use, as SUPPORT names them."""
        parts = {"window": self.window, "softcap": self.softcap, "sinks": self.sinks}
        return frozenset(name for name, value in parts.items() if value is not None)

    def first_visible(self, position: int) -> int:
        """The first position that a query at `position` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)


def _within(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and low <= value <= high
