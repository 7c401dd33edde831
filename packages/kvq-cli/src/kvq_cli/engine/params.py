"""What goes into the engine and what comes out: the words a server and the engine share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


class RequestRejected(ValueError):
    """A request the engine can never serve; the message gives the numbers."""


class EngineFailed(RuntimeError):
    """The engine's worker stopped on an error; requests cannot be served any more."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen.

    Attributes
    ----------
    max_tokens : most tokens to generate; None = as many as the context allows
    temperature : 0 = greedy
    top_p : smallest set of tokens whose probabilities reach this sum
    top_k : only the k most likely tokens; 0 = all
    min_p : only tokens at least this share as likely as the most likely one
    seed : draws are reproducible for a seed, whatever else is in the batch; None = fresh
    stop : generation ends before the first of these strings appears in the text
    ignore_eos : do not end at the model's end-of-sequence tokens
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        checks = (
            (
                self.max_tokens is None or self.max_tokens >= 1,
                "max_tokens",
                self.max_tokens,
                "at least 1",
            ),
            (0.0 <= self.temperature <= 100.0, "temperature", self.temperature, "0 to 100"),
            (0.0 < self.top_p <= 1.0, "top_p", self.top_p, "above 0, at most 1"),
            (self.top_k >= 0, "top_k", self.top_k, "0 (all) or more"),
            (0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "0 to 1"),
            (all(self.stop), "stop", self.stop, "strings that are not empty"),
        )
        for ok, name, given, allowed in checks:
            if not ok:
                raise RequestRejected(f"{name} must be {allowed}, got {given!r}")


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one request.

    Attributes
    ----------
    text : new text; may be empty while a character or a possible stop string is incomplete
    token_ids : new tokens (the end-of-sequence token included)
    finish_reason : set on the last delta of a request, else None
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters (totals since start) and gauges (now)."""

    running: int
    waiting: int
    pages_total: dict[str, int]  # per tier
    pages_free: dict[str, int]  # per tier
    prompt_tokens_total: int
    generation_tokens_total: int
    requests_finished_total: dict[str, int]  # per finish reason
    steps_total: int
