"""How far two predictions of the next token are apart, and how well one predicts a text.

Logarithms of probabilities are float64: the divergences of the best formats are smaller than what
float32 rounds off a logit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvq_cli.config import ConfigError

# Rows whose probabilities are held at once; a row of a large vocabulary takes 2 MB.
BLOCK_ROWS = 64


class NotFiniteError(ConfigError):
    """Predictions that are none; the message names the format that they were made over."""


@dataclass(slots=True)
class Divergence:
    """What becomes known about a format, token by token, beside the reference.

    Attributes
    ----------
    nll : −log probability of each next token of the text (nats)
    kl : KL(reference ‖ format) of each prediction (nats)
    agreeing : predictions whose most likely token is the reference's
    """

    nll: list[torch.Tensor] = field(default_factory=list)
    kl: list[torch.Tensor] = field(default_factory=list)
    agreeing: int = 0

    def add(self, logits: torch.Tensor, reference: torch.Tensor, targets: torch.Tensor) -> None:
        """Predictions [n, vocabulary] of the tokens [n] that follow in the text."""
        for start in range(0, len(targets), BLOCK_ROWS):
            block = slice(start, start + BLOCK_ROWS)
            ours, theirs = (x[block].double().log_softmax(-1) for x in (logits, reference))
            self.nll.append(-ours.gather(-1, targets[block, None])[:, 0].cpu())
            self.agreeing += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
            # a token that the reference excludes adds nothing, whatever the format makes of it
            terms = torch.where(theirs == -torch.inf, 0.0, theirs.exp() * (theirs - ours))
            self.kl.append(terms.sum(-1).cpu())

    def summary(self) -> dict[str, Any]:
        """Perplexity, KL (mean, 99% and 99.9% quantile, by linear interpolation), agreement."""
        nll, kl = torch.cat(self.nll).numpy(), torch.cat(self.kl).numpy()
        return {
            "perplexity": rounded(np.exp(nll.mean())),
            "kl_mean": rounded(kl.mean()),
            "kl_99": rounded(np.quantile(kl, 0.99)),
            "kl_999": rounded(np.quantile(kl, 0.999)),
            "top1_agreement": rounded(self.agreeing / len(kl)),
        }


def answer_nll(logits: torch.Tensor, answer: torch.Tensor) -> tuple[bool, float]:
    """Whether greedy decoding gives the tokens [n] of an answer, and their mean −log probability.

    `logits` [n, vocabulary]: predictions of each, with those before it in sight.
    """
    chosen = logits.double().log_softmax(-1).gather(-1, answer[:, None])
    return bool((logits.argmax(-1) == answer).all()), float(-chosen.mean())


def agreeing_tokens(logits: torch.Tensor, continuation: torch.Tensor) -> int:
    """Tokens of a continuation [n] that greedy decoding gives before it takes another way.

    `logits` [n, vocabulary]: predictions of each, with those before it in sight. Up to the first
    difference both ways have seen the same, so nothing needs to be generated to know it.
    """
    other = (logits.argmax(-1) != continuation).nonzero()
    return int(other[0]) if len(other) else len(continuation)


def is_finite(logits: torch.Tensor) -> bool:
    """Whether each row of logits [n, vocabulary] is a prediction: some tokens may be excluded."""
    return bool(logits.amax(-1).isfinite().all())  # of a row with a NaN the largest is NaN


def rounded(value: Any, digits: int = 6) -> float:
    """A figure as records hold it: what lies beyond is noise of the order of summation."""
    return float(f"{float(value):.{digits}g}")
