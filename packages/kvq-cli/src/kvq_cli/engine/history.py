"""What a request holds so far, token by token."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class History:
    """The distinct tokens of a request and how often each is in its answer.

    It follows the request's tokens when it is asked, so that who needs no counts pays nothing.
    """

    __slots__ = ("_counts", "_length", "_places", "_tokens")

    def __init__(self) -> None:
        self._length = 0  # of what was followed
        self._places: dict[int, int] = {}  # token → index into both of these
        self._tokens = array("q")
        self._counts = array("q")

    def follow(self, tokens: Sequence[int], prompt_tokens: int) -> None:
        """Count what came since the last time; `tokens` only ever grow."""
        for position in range(self._length, len(tokens)):
            token = tokens[position]
            place = self._places.setdefault(token, len(self._tokens))
            if place == len(self._tokens):
                self._tokens.append(token)
                self._counts.append(0)
            self._counts[place] += position >= prompt_tokens
        self._length = len(tokens)

    def distinct(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Tokens, none twice, and for each how often it was generated."""
        return np.array(self._tokens, np.int64), np.array(self._counts, np.int64)
