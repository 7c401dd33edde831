"""A sentence hidden in a long text, and a question that only it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvq_cli.config import ConfigError

STATEMENT = " The lighthouse number is"
DEPTHS = (0.1, 0.5, 0.9)


class NoRoomError(ConfigError):
    """A needle that is longer than it may be.

    Attributes
    ----------
    needed : tokens that its sentence and its question take
    """

    def __init__(self, length: int, needed: int) -> None:
        super().__init__(
            f"a needle of {length} tokens has no room for its sentence and its question, which "
            f"take {needed}; give a longer --context"
        )
        self.needed = needed


@dataclass(frozen=True, slots=True)
class Needle:
    """Tokens that end with the answer.

    Attributes
    ----------
    depth : share of the text before the sentence
    answer_tokens : how many of the last tokens are the answer
    """

    tokens: list[int]
    depth: float
    answer_tokens: int


def hide(
    tokenizer: Any, start: Sequence[int], text: Sequence[int], length: int, depth: float
) -> Needle:
    """A needle of exactly `length` tokens: start, text, sentence, text, question, answer.

    Raises `NoRoomError` when sentence and question alone are longer.
    """

    def encode(words: str) -> list[int]:
        return list(tokenizer.encode(words, add_special_tokens=False))

    # a number of its own for each, so that none is known from elsewhere
    answer = encode(f" {10_007 + (length * 7919 + round(depth * 100) * 104_729) % 89_989}")
    statement = encode(STATEMENT)
    sentence = [*statement, *answer, *encode(".")]
    room = length - len(start) - len(sentence) - len(statement) - len(answer)
    if room < 0:
        raise NoRoomError(length, length - room)
    before = round(room * depth)
    tokens = [*start, *text[:before], *sentence, *text[before:room], *statement, *answer]
    return Needle(tokens, depth, len(answer))
