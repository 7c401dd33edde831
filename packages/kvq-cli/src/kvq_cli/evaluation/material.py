"""What every format is given: a text in pieces, prompts to continue, needles to find."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
    """

    windows: list[list[int]]
    prompts: list[list[int]]
    new_tokens: int
    needles: list[Needle]

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
        )

    @property
    def num_tokens(self) -> int:
        """Tokens that each format computes."""
        return sum(map(len, self._alone)) + sum(self._together)

    @property
    def capacity(self) -> list[int]:
        """Lengths of the sequences that are in a cache at the same time."""
        longest = max(map(len, self._alone))
        return self._together if sum(self._together) > longest else [longest]

    @property
    def _alone(self) -> list[list[int]]:
        return [*self.windows, *(needle.tokens for needle in self.needles)]

    @property
    def _together(self) -> list[int]:
        return [len(prompt) + self.new_tokens for prompt in self.prompts]
