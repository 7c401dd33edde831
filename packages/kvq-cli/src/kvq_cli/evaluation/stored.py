"""What codecs make of a model's own keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import kvq_codecs
from kvq_cli.evaluation.metrics import rounded


@dataclass(slots=True)
class _Sums:
    """Of one layer's keys or values."""

    count: int = 0
    squares: float = 0.0
    magnitudes: float = 0.0
    # codec → sums of the error and of its square
    errors: dict[str, float] = field(default_factory=dict)
    squared_errors: dict[str, float] = field(default_factory=dict)
    # [heads, dim]
    channels: torch.Tensor | float = 0.0


class RowErrors:
    """Errors of rows that were written and read back, layer by layer.

    Parameters
    ----------
    codecs : those to try, on keys and on values
    """

    def __init__(self, codecs: Mapping[str, Sequence[str]]) -> None:
        self._codecs = codecs
        self._sums: dict[tuple[str, int], _Sums] = {}

    def add(self, side: str, layer: int, rows: torch.Tensor) -> None:
        """Rows [tokens, heads, dim] of side "k" or "v" as the model made them."""
        sums = self._sums.setdefault((side, layer), _Sums())
        exact = rows.double()
        sums.count += exact.numel()
        sums.squares += float(exact.square().sum())
        sums.magnitudes += float(exact.abs().sum())
        if side == "k":
            sums.channels = sums.channels + exact.abs().sum(0)
        for name in self._codecs.get(side, ()):
            codec = kvq_codecs.get(name)
            error = codec.decode(codec.encode(rows)).double() - exact
            sums.errors[name] = sums.errors.get(name, 0.0) + float(error.sum())
            squared = sums.squared_errors.get(name, 0.0)
            sums.squared_errors[name] = squared + float(error.square().sum())

    def layer(self, side: str, layer: int, codec: str) -> dict[str, Any]:
        """Relative error ‖x̂ − x‖ / ‖x‖ and mean error Σ(x̂ − x) / Σ|x| of a codec in a layer."""
        sums = self._sums[side, layer]
        return {
            "codec": codec,
            "relative_error": rounded(_ratio(sums.squared_errors[codec], sums.squares) ** 0.5),
            "mean_error": rounded(_ratio(sums.errors[codec], sums.magnitudes)),
        }

    def total(self, side: str, codecs: Mapping[int, str]) -> float:
        """Relative error of all layers together; `codecs`: layer → codec."""
        sums = {layer: self._sums[side, layer] for layer in codecs}
        errors = sum(sums[layer].squared_errors[codec] for layer, codec in codecs.items())
        return rounded(_ratio(errors, sum(each.squares for each in sums.values())) ** 0.5)

    def outliers(self) -> dict[int, float]:
        """Layer → how far its largest key channel stands out: max / median of mean |k|.

        Of the head in which it stands out most; not finite where a head's median channel is 0.
        """
        return {
            layer: rounded(outlier_ratio(torch.as_tensor(sums.channels) / sums.count))
            for (side, layer), sums in sorted(self._sums.items())
            if side == "k"
        }


def outlier_ratio(means: torch.Tensor) -> float:
    """Largest max / median over the channels of a head, of mean |k| [heads, dim]."""
    # the median of an even number is the mean of the middle two
    middle = torch.quantile(means, 0.5, dim=-1)
    return float((means.amax(-1) / middle).max())


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
