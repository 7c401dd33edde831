"""Logits to tokens, for all requests of a step at once.

A row's token depends on its own request alone: on its logits, its parameters, its seed and how
many tokens it has, never on the other rows. Nothing waits for the device but the tokens at the end.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvq_cli.config.workspace import DRAWN_VALUES
from kvq_cli.engine.params import MOST_LOGPROBS, SamplingParams, TokenLogprobs
from kvq_cli.engine.penalties import biased, penalized
from kvq_cli.engine.request import Request

NO_TOKEN = -1  # where the logits were no numbers
WORD = 2**64
CANDIDATES = 1024  # among which a CPU looks for what top-k and top-p keep before it sorts all


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token a row, or `NO_TOKEN`; and what the model thought of it, where that was asked."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]


def draw_key(params: SamplingParams, choice: int = 0) -> int | None:
    """What sets a request's draws apart, 64 bits; None when it is greedy.

    `choice`: its number among those of one prompt; the first draws as it would alone.
    """
    if params.temperature == 0.0:
        return None
    seed = params.seed if params.seed is not None else secrets.randbits(64)
    mixed = int(_mix(np.asarray([seed % WORD], np.uint64))[0])
    return (mixed + choice * int(GAMMA)) % WORD


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """Tokens that a device draws.

    Attributes
    ----------
    requests : R requests
    tokens : int64 [R], theirs
    host : where they are when `ready`, an event; None = now
    told : of some rows at a time, what was asked about their tokens
    """

    requests: tuple[Request, ...]
    tokens: torch.Tensor
    host: torch.Tensor
    ready: Any
    told: list[tuple[Sequence[int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]

    @torch.inference_mode()
    def only(self, rows: Sequence[int]) -> torch.Tensor:
        """The tokens of some rows, on their device."""
        if len(rows) == len(self.requests):
            return self.tokens
        return self.tokens[_to(rows, self.tokens)]

    def read(self) -> Sampled:
        """Wait for them."""
        if self.ready is not None:
            self.ready.synchronize()
        found = Sampled(self.host.tolist(), [None] * len(self.requests))
        for rows, (own, top, top_tokens) in self.told:
            lines = zip(rows, own.tolist(), top_tokens.tolist(), top.tolist(), strict=True)
            for row, mine, others, values in lines:
                most = self.requests[row].params.logprobs
                pairs = tuple(zip(others, values, strict=True))[:most]
                found.logprobs[row] = TokenLogprobs(found.tokens[row], mine, pairs)
        return found


def sample(logits: torch.Tensor, requests: Sequence[Request]) -> Sampled:
    """One token per request: see `draw`."""
    return draw(logits, requests).read()


@torch.inference_mode()
def draw(logits: torch.Tensor, requests: Sequence[Request], ahead: int = 0) -> Drawn:
    """One token per request, on its way to the host.

    Parameters
    ----------
    logits : [R, vocabulary]
    requests : R requests, in the order of the rows
    ahead : tokens before it that the requests do not have yet
    """
    raw = logits.float()
    scores = penalized(biased(raw, requests), requests)
    tokens = scores.argmax(dim=-1)
    best = scores.gather(1, tokens[:, None])[:, 0]
    drawn = [row for row, request in enumerate(requests) if request.draw_key is not None]
    for rows in _chunks(drawn, scores.shape[1]):
        index = _to(rows, scores)
        chosen = [requests[row] for row in rows]
        tokens[index] = _draw(scores[index], best[index], chosen, ahead)
    tokens = torch.where(best.isfinite(), tokens, NO_TOKEN)
    asked = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
    told = [(rows, _log_softmax(raw, tokens, rows)) for rows in _chunks(asked, scores.shape[1])]
    if tokens.device.type != "cuda":
        return Drawn(tuple(requests), tokens, tokens, None, told)
    host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
    host.copy_(tokens, non_blocking=True)
    event: Any = torch.cuda.Event
    ready = event()
    ready.record()
    return Drawn(tuple(requests), tokens, host, ready, told)


def _chunks(rows: Sequence[int], vocabulary: int) -> Iterator[Sequence[int]]:
    """So many rows at a time that their distributions stay small."""
    step = max(1, DRAWN_VALUES // vocabulary)
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


def _to(values: Sequence[float] | npt.NDArray[np.generic], like: torch.Tensor) -> torch.Tensor:
    """Values of the host on a tensor's device, for which nobody waits: they are few."""
    return torch.from_numpy(np.asarray(values)).to(like.device, non_blocking=True)


def _draw(
    scores: torch.Tensor, best: torch.Tensor, requests: Sequence[Request], ahead: int
) -> torch.Tensor:
    """Tokens [R] drawn from scores [R, V] whose largest are `best`: temperature first, then
    top-k, top-p and min-p.
    """
    params = [request.params for request in requests]
    # a float32 has no smaller one that divides; relative to the best, which stays at 0
    heat = _to(np.maximum([p.temperature for p in params], 1e-30).astype(np.float32), scores)
    scores = (scores - best[:, None]).div_(heat[:, None])
    cut = [row for row, p in enumerate(params) if p.top_k or p.top_p < 1.0]
    if cut:
        rows = _to(cut, scores)
        scores[rows] = _cut(scores[rows], [params[row] for row in cut])
    weights = scores.exp_()  # 1 for the best
    if any(p.min_p for p in params):
        least = _to(np.asarray([p.min_p for p in params], np.float32), scores)
        weights.masked_fill_(weights < least[:, None], 0.0)
    mass = weights.cumsum(dim=-1, dtype=torch.float64)
    point = _to(_points(requests, ahead), mass)[:, None] * mass[:, -1:]
    return torch.searchsorted(mass, point, right=True)[:, 0]


def _log_softmax(
    raw: torch.Tensor, tokens: torch.Tensor, rows: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of some rows: their tokens' logarithms of probability [R], the largest [R, k] and whose.

    k is the same whatever is asked, so that what is said of equal ones is the same.
    """
    index = _to(rows, raw)
    logits = raw[index]
    total = logits.logsumexp(dim=-1, keepdim=True)
    own = logits.gather(1, tokens[index].clamp(min=0)[:, None]) - total
    top, top_tokens = logits.topk(min(MOST_LOGPROBS, logits.shape[1]), dim=-1)
    return own[:, 0], top - total, top_tokens


def _cut(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Scores [R, V], relative to the best, without those that top-k and top-p leave out."""
    vocabulary = scores.shape[1]
    most = _to([min(p.top_k or vocabulary, vocabulary) for p in params], scores)
    share = _to([p.top_p if p.top_p < 1.0 else 2.0 for p in params], scores)  # 2: never reached
    if scores.device.type == "cpu" and vocabulary > CANDIDATES:
        found, decided = _cut_candidates(scores, most, share)
        rest = (~decided).nonzero()[:, 0]
        if len(rest):
            found[rest] = _cut_sorted(scores[rest], most[rest], share[rest])
        return found
    return _cut_sorted(scores, most, share)


def _cut_sorted(scores: torch.Tensor, most: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    mass = _mass(ordered, most)
    return _only(scores, ordered, order, _keep(mass, most, share * mass[:, -1]))


def _cut_candidates(
    scores: torch.Tensor, most: torch.Tensor, share: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same from the best alone, which a CPU finds in a tenth of the time of sorting all; and
    bool [R]: in which rows they decide it.
    """
    ordered, order = scores.topk(CANDIDATES, dim=-1, sorted=False)
    order, places = order.sort(dim=-1)  # of equal ones the first, as a stable sort has them
    ordered, places = ordered.gather(1, places).sort(dim=-1, descending=True, stable=True)
    order = order.gather(1, places)
    mass = _mass(ordered, most)
    limited = most <= CANDIDATES
    whole = scores.exp().sum(dim=-1, dtype=torch.float64)
    goal = share * torch.where(limited, mass[:, -1], whole)
    reached = (most >= scores.shape[1]) & (mass[:, -1] >= goal)
    return _only(scores, ordered, order, _keep(mass, most, goal)), limited | reached


def _mass(ordered: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
    """Sums float64 [R, n] of the weights of ordered scores, of `most` of them at most."""
    counted = torch.arange(ordered.shape[1], device=ordered.device) < most[:, None]
    return ordered.exp().mul_(counted).cumsum(dim=-1, dtype=torch.float64)


def _keep(mass: torch.Tensor, most: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    """Which of ordered scores stay: `most` at most, and as long as those before miss the goal."""
    keep = torch.arange(mass.shape[1], device=mass.device) < most[:, None]
    keep[:, 1:] &= mass[:, :-1] < goal[:, None]
    return keep


def _only(
    scores: torch.Tensor, ordered: torch.Tensor, order: torch.Tensor, keep: torch.Tensor
) -> torch.Tensor:
    """Scores [R, V] of those that stay, in their own places."""
    return torch.full_like(scores, -torch.inf).scatter_(
        1, order, ordered.masked_fill(~keep, -torch.inf)
    )


# ---- draws --------------------------------------------------------------------------------------

# The constants of splitmix64, whose output function turns a counter into random bits.
GAMMA = np.uint64(0x9E3779B97F4A7C15)
FIRST, SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def _points(requests: Sequence[Request], ahead: int = 0) -> npt.NDArray[np.float64]:
    """Where in [0, 1) each request's next draw falls: by its key and its number of tokens."""
    keys = np.asarray([request.draw_key for request in requests], np.uint64)
    places = np.asarray([request.completion_tokens + 1 + ahead for request in requests], np.uint64)
    bits = _mix(keys ^ _mix(places * GAMMA))
    # so coarse that no product rounds to the whole
    return (bits >> np.uint64(16)).astype(np.float64) * 2.0**-48


def _mix(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * FIRST
    bits = (bits ^ (bits >> np.uint64(27))) * SECOND
    return bits ^ (bits >> np.uint64(31))
