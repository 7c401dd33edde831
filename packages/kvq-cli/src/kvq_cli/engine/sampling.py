"""Logits to tokens."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch

from kvq_cli.engine.params import SamplingParams
from kvq_cli.engine.request import Request


def make_generator(params: SamplingParams) -> torch.Generator | None:
    """A request's own source of draws (on the CPU), or None when it is greedy."""
    if params.temperature == 0.0:
        return None
    generator = torch.Generator()
    generator.manual_seed(params.seed if params.seed is not None else secrets.randbits(63))
    return generator


def sample(logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
    """One token per request.

    Parameters
    ----------
    logits : [R, vocabulary]
    requests : R requests, in the order of the rows
    """
    logits = logits.float()
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    for row, request in enumerate(requests):
        if request.generator is not None:
            tokens[row] = _draw(logits[row].cpu(), request.params, request.generator)
    return tokens


def _draw(logits: torch.Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    """Draw from [vocabulary] logits: temperature first, then top-k, top-p and min-p."""
    # relative to the largest, which the smallest temperature then leaves at 0
    scores = (logits.double() - logits.max()) / params.temperature
    # sorted once: all three filters keep a prefix of the descending order
    probs, order = torch.softmax(scores, dim=-1).sort(descending=True, stable=True)
    keep = len(probs)
    if params.top_k:
        keep = min(keep, params.top_k)
    if params.top_p < 1.0:
        mass = probs[:keep].cumsum(0)
        keep = min(keep, int((mass < params.top_p * mass[-1]).sum()) + 1)
    if params.min_p > 0.0:
        keep = min(keep, max(1, int((probs >= params.min_p * probs[0]).sum())))
    mass = probs[:keep].cumsum(0)
    point = torch.rand((), generator=generator, dtype=torch.float64) * mass[-1]
    index = int(torch.searchsorted(mass, point, right=True))
    return int(order[min(index, keep - 1)])
