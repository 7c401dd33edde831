"""One conversation's claim on memory, and its answer so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvq_cli.engine.detokenize import Detokenizer
from kvq_cli.engine.history import History
from kvq_cli.engine.params import FinishReason, SamplingParams
from kvq_pools import SequencePages


@dataclass(slots=True, eq=False)
class Request:
    """A request from submission to its last token.

    Attributes
    ----------
    tokens : prompt, then what was generated
    prompt_tokens : length of the prompt
    max_total_tokens : generation ends at this length; None = where the context ends
    num_computed : tokens whose K and V are in the cache: [0, num_computed)
    prefill_until : tokens before this position are prefilled (attend to their own chunk
        unquantized); those from it on are decoded one at a time. The scheduler sets it on
        admission: the prompt's length, or all tokens so far when a preempted request returns
        of which not all was kept.
    stops : where a chunk of its prefill ends at the latest, for a snapshot to be had there
    cached_tokens : tokens of the prompt that the prefix cache had when the request first ran;
        None before that
    pages : None while the request waits
    draw_key : what sets this request's draws apart; None when greedy
    arrival : its number in the order in which requests came
    twins : further choices of the same prompt, which begin where its own prefill ends; until then
        they share `tokens`
    """

    request_id: str
    tokens: list[int]
    params: SamplingParams
    prompt_tokens: int
    max_total_tokens: int | None
    detokenizer: Detokenizer
    draw_key: int | None = None
    arrival: int = 0
    num_computed: int = 0
    prefill_until: int = 0
    stops: tuple[int, ...] = ()
    cached_tokens: int | None = None
    pages: SequencePages | None = None
    finish_reason: FinishReason | None = None
    twins: list[Request] = field(default_factory=list)
    history: History = field(default_factory=History)

    @property
    def decoding(self) -> bool:
        """Whether its next step is a decode."""
        return self.num_computed >= self.prefill_until

    @property
    def pending_twins(self) -> list[Request]:
        """Its twins that nobody cancelled."""
        return [twin for twin in self.twins if twin.finish_reason is None]

    @property
    def completion_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def least_total_tokens(self) -> int:
        """Tokens that the cache must be able to hold for it, alone, or it never ends."""
        return self.max_total_tokens or len(self.tokens) + 1

    def step_tokens(self, count: int) -> Sequence[int]:
        """The next `count` tokens to compute."""
        return self.tokens[self.num_computed : self.num_computed + count]
