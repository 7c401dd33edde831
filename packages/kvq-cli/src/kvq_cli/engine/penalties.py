"""Scores that a request moves: by what it has said so far, and by what its sender wants."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvq_cli.engine.request import Request


def biased(scores: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """Scores [R, vocabulary] float32 with the requests' biases; what came in is not changed."""
    found = [
        (row, token, value)
        for row, request in enumerate(requests)
        for token, value in request.params.logit_bias
    ]
    if not found:
        return scores
    rows, tokens, values = zip(*found, strict=True)
    where = torch.tensor([rows, tokens]).to(scores.device)
    how = torch.tensor(values, dtype=scores.dtype).to(scores.device)
    return scores.index_put(tuple(where), how, accumulate=True)


def penalized(scores: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """Scores [R, vocabulary] float32 after the requests' penalties; what came in is not changed.

    A score of a token that the prompt or the answer holds is divided by the repetition penalty,
    or multiplied where it is negative. From one that the answer holds, the presence penalty is
    subtracted, and the frequency penalty as often as it is there.
    """
    found = [
        (row, request.params, *_distinct(request))
        for row, request in enumerate(requests)
        if request.params.penalized
    ]
    if not found:
        return scores
    lengths = [len(tokens) for _, _, tokens, _ in found]

    def of_each(values: Sequence[float]) -> np.ndarray:
        return np.repeat(np.asarray(values, np.float64), lengths)

    counts = np.concatenate([times for *_, times in found])
    lowered = of_each([params.frequency_penalty for _, params, *_ in found]) * counts
    lowered += of_each([params.presence_penalty for _, params, *_ in found]) * (counts > 0)
    repetition = of_each([params.repetition_penalty for _, params, *_ in found])
    device = scores.device
    # where: one line for the rows, one for the tokens, no pair twice
    rows = np.repeat([row for row, *_ in found], lengths)
    where = torch.from_numpy(np.stack([rows, np.concatenate([t for *_, t, _ in found])]))
    how = torch.from_numpy(np.stack([repetition, lowered]).astype(np.float32)).to(device)
    place = tuple(where.to(device))
    old = scores[place]
    new = torch.where(old > 0, old / how[0], old * how[0]) - how[1]
    return scores.index_put(place, new)


def _distinct(request: Request) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that a request holds and how often its answer does."""
    history = request.history
    history.follow(request.tokens, request.prompt_tokens)
    return history.distinct()
