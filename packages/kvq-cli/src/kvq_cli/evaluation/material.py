"""What every format is given: a text in pieces, prompts, needles to find, calls to write."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from kvq_cli.evaluation.calls import Call, asked
from kvq_cli.evaluation.needles import DEPTHS, Needle, hide
from kvq_cli.evaluation.texts import Tokens

GREEDY_PROMPTS, GREEDY_TOKENS = 4, 64
MOST_TOKENS = 4096  # of a text, unless more are asked for


@dataclass(frozen=True, slots=True)
class Material:
    """Sequences of tokens.

    Attributes
    ----------
    windows : pieces of the text, each computed for itself
    prompts : beginnings that greedy decoding continues
    new_tokens : by how many
    needles : sentences hidden in the text, with the questions that they answer
    calls : of a function, to be written as JSON
    """

    windows: list[list[int]]
    prompts: list[list[int]]
    new_tokens: int
    needles: list[Needle]
    calls: list[Call]

    @classmethod
    def cut(
        cls, tokenizer: Any, tokens: Tokens, *, context: int, num_tokens: int | None = None
    ) -> Material:
        """From a text: windows of `context` tokens that make `num_tokens`; None = what there is.

        Raises `ConfigError` when the text, or the context, is too short.
        """
        windows = tokens.windows(context, num_tokens, MOST_TOKENS)
        used = tokens.body[: len(windows) * (context - len(tokens.start))]
        prompt = max(1, context // 4)
        spread = len(used) - prompt
        starts = [i * spread // GREEDY_PROMPTS for i in range(GREEDY_PROMPTS)]
        return cls(
            windows,
            [tokens.start + used[i : i + prompt] for i in starts],
            min(GREEDY_TOKENS, context - prompt - len(tokens.start)),
            [
                hide(tokenizer, tokens.start, used, length, depth)
                for length in (context // 2, context)
                for depth in DEPTHS
            ],
            asked(tokenizer, tokens.start, context),
        )

    @property
    def num_tokens(self) -> int:
        """Tokens that each format computes."""
        return sum(map(len, self._alone)) + sum(self._continued) + sum(self._called)

    @property
    def capacity(self) -> list[int]:
        """Lengths of the sequences that a cache must hold at the same time.

        What is decoded together is there together; everything else has the cache to itself.
        """
        groups = [[max(map(len, self._alone))], self._continued, self._called]
        longest_first = (sorted(lengths, reverse=True) for lengths in groups)
        return [max(lengths) for lengths in zip_longest(*longest_first, fillvalue=0)]

    @property
    def _alone(self) -> list[list[int]]:
        return [*self.windows, *(needle.tokens for needle in self.needles)]

    @property
    def _continued(self) -> list[int]:
        return [len(prompt) + self.new_tokens for prompt in self.prompts]

    @property
    def _called(self) -> list[int]:
        return [len(call.prompt) + self.call_tokens for call in self.calls]

    @property
    def call_tokens(self) -> int:
        """Tokens that are decoded of each call."""
        return max((call.new_tokens for call in self.calls), default=0)
