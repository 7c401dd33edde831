"""What goes into the engine and what comes out: the words a server and the engine share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvq_pools import PrefixStats, SnapshotStats

FinishReason = Literal["stop", "length", "abort", "error"]

MOST_LOGPROBS = 20  # alternatives that can be asked for of each token


class RequestRejected(ValueError):
    """A request the engine can never serve; the message gives the numbers.

    `param`: the sampling parameter that is to blame, if one is.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestFailed(RuntimeError):
    """Computing a request went wrong; the engine serves on."""


class EngineFailed(RuntimeError):
    """The engine's worker stopped on an error; requests cannot be served any more."""


class RebuildBusy(RuntimeError):
    """A rebuild was asked for while another one runs."""


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
    presence_penalty, frequency_penalty : subtracted from the score of a token that was generated,
        once and as often as it was
    repetition_penalty : divides the score of a token of the prompt or the answer, multiplies it
        where it is negative; 1 = none
    logit_bias : (token, what is added to its logit) pairs, no token twice
    seed : draws are reproducible for a seed, whatever else is in the batch; None = fresh
    stop : generation ends before the first of these strings appears in the text
    ignore_eos : do not end at the model's end-of-sequence tokens
    logprobs : of how many of the most likely tokens to tell the logarithms of their probabilities
        beside the chosen one's, before penalties and temperature; None = not even of that
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

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
            *(
                (-2.0 <= getattr(self, name) <= 2.0, name, getattr(self, name), "-2 to 2")
                for name in ("presence_penalty", "frequency_penalty")
            ),
            (
                0.01 <= self.repetition_penalty <= 100.0,  # scores stay finite
                "repetition_penalty",
                self.repetition_penalty,
                "0.01 to 100",
            ),
            (
                self.logprobs is None or 0 <= self.logprobs <= MOST_LOGPROBS,
                "logprobs",
                self.logprobs,
                f"0 to {MOST_LOGPROBS}",
            ),
            (
                all(-100.0 <= value <= 100.0 for _, value in self.logit_bias),
                "logit_bias",
                dict(self.logit_bias),
                "-100 to 100 for every token",
            ),
            (all(self.stop), "stop", self.stop, "strings that are not empty"),
        )
        for ok, name, given, allowed in checks:
            if not ok:
                raise RequestRejected(f"{name} must be {allowed}, got {given!r}", name)

    @property
    def looks_back(self) -> bool:
        """Whether a draw needs to know the tokens before it, or tells more than the token."""
        return self.penalized or self.logprobs is not None

    @property
    def penalized(self) -> bool:
        """Whether what was said so far changes what is said next."""
        return bool(
            self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty
        )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely the model held a token, before penalties and temperature.

    Attributes
    ----------
    logprob : natural logarithm of the token's probability
    top : the most likely tokens and theirs, the most likely first
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one request.

    Attributes
    ----------
    text : new text; may be empty while a character or a possible stop string is incomplete
    token_ids : new tokens (the end-of-sequence token included)
    finish_reason : set on the last delta of a request, else None
    cached_tokens : tokens of the prompt that were not computed: the prefix cache had them
    logprobs : of the new tokens, if they were asked for; not of the end-of-sequence token, which
        is no part of the text
    error : what went wrong, when that is how it finished
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None


def merged(deltas: Sequence[Delta]) -> Delta:
    """One delta that says what several of one request say, in their order."""
    if len(deltas) == 1:
        return deltas[0]
    return Delta(
        "".join(delta.text for delta in deltas),
        tuple(token for delta in deltas for token in delta.token_ids),
        deltas[-1].finish_reason,
        deltas[0].cached_tokens,
        tuple(each for delta in deltas for each in delta.logprobs),
        deltas[-1].error,
    )


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The cache at one moment.

    Attributes
    ----------
    cache_dtype : a codec, or k=CODEC,v=CODEC
    num_tokens : tokens that fit at the same time
    nbytes : bytes of the whole pool, padding pages and fixed tiers included
    bytes_per_token : bytes of one token in the tiers that grow
    max_model_len : longest request (tokens, prompt and generated together)
    attention : op → the backend that computes it over this cache
    """

    cache_dtype: str
    num_tokens: int
    nbytes: int
    bytes_per_token: float
    max_model_len: int
    attention: dict[str, str]


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """What a rebuild did.

    Attributes
    ----------
    finished_at : seconds since the epoch
    seconds : how long no step was computed
    requests_kept, requests_requeued : running requests that kept their pages; that are computed
        again
    cached_kept, cached_dropped : pages of the prefix cache, per tier
    error : why it failed, `after` then being `before`; None when it succeeded
    """

    before: CacheSize
    after: CacheSize
    finished_at: float
    seconds: float
    requests_kept: int
    requests_requeued: int = 0
    cached_kept: dict[str, int] = field(default_factory=dict)
    cached_dropped: dict[str, int] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """What some layers store in a tier, and how.

    Attributes
    ----------
    name : k, v
    codec : its format
    layers : of the model
    nbytes : of all pages, the padding page included
    """

    name: str
    codec: str
    layers: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier of the pool now.

    Attributes
    ----------
    window : positions a query sees; None = all
    page_bytes : bytes of one page
    nbytes : bytes of all pages, the padding page included
    pages_free : pages that hold nothing
    pages_cached : pages of the prefix cache that no request runs on; they are given up when needed
    stored : what its pages hold of which layers
    """

    name: str
    window: int | None
    page_bytes: int
    nbytes: int
    pages_total: int
    pages_free: int
    pages_cached: int
    stored: tuple[Stored, ...] = ()

    @property
    def pages_used(self) -> int:
        """Pages that running requests hold."""
        return self.pages_total - self.pages_free - self.pages_cached


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters (totals since start) and gauges (now)."""

    running: int
    waiting: int
    tiers: tuple[TierStats, ...]
    prefix: PrefixStats
    prompt_tokens_total: int
    generation_tokens_total: int
    requests_finished_total: dict[str, int]  # per finish reason
    steps_total: int
    extend_routes: dict[str, int] = field(default_factory=dict)  # launches by how a past is read
    preemptions_total: int = 0
    snapshots: SnapshotStats = field(default_factory=SnapshotStats)  # of states, if it has any
    last_rebuild: RebuildReport | None = None


@dataclass(frozen=True, slots=True)
class AttentionCheck:
    """What came of trying the kernels of a cache before it served.

    Attributes
    ----------
    kernels : that agree with the formats' definition: ops of a backend, format and layer each
    seconds : that it took
    fallbacks : which backend stands in for one that failed, and how that failed, in words
    """

    kernels: int
    seconds: float
    fallbacks: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kernels} kernels agree with the formats' definition, in {self.seconds:.1f} s"


@dataclass(frozen=True, slots=True)
class EngineSummary:
    """What a start-up message, a status page or a metric says of the engine.

    Attributes
    ----------
    bytes_per_token, bf16_bytes_per_token : KV bytes of one token in the tiers that grow
    page_tokens, num_tokens : tokens of a page; tokens that fit at the same time
    bf16_num_tokens : tokens that would fit in the same bytes as bf16
    attention : op (store, decode, extend) → the backend that computes it
    state_bytes : of one request's states in linear-attention layers
    states, snapshots : how many there is memory for: of running requests, beside cached pages
    weights : their type and where they are
    prefill_reads : "own" or "packed": what a prompt's tokens see of those of the same step
    attention_check : of the present cache; None = its kernels were not tried
    notes : what the user should know before trusting the answers
    """

    model_name: str
    cache_dtype: str
    bytes_per_token: float
    bf16_bytes_per_token: float
    page_tokens: int
    num_tokens: int
    bf16_num_tokens: int
    max_model_len: int
    cache_bytes: int
    attention: dict[str, str]
    weights: str
    prefix_cache: bool
    state_bytes: int = 0
    states: int = 0
    snapshots: int = 0
    prefill_reads: str = "own"
    attention_check: AttentionCheck | None = None
    notes: tuple[str, ...] = ()
