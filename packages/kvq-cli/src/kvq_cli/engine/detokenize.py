"""Tokens to text as they arrive, ending before a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Text of a growing token sequence.

    A token may hold part of a character and a tokenizer may join a token to the one before it,
    so new text is the difference of two decodes over a short window of recent tokens. Text that
    could be the start of a stop string is held back until it is decided.
    """

    def __init__(
        self, tokenizer: Any, stop: Sequence[str] = (), context: Sequence[int] = ()
    ) -> None:
        """`context`: the prompt's last tokens; its text is not repeated, only joined to."""
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._tokens = list(context)
        self._window_start = 0  # decode from here …
        self._emitted_until = len(self._tokens)  # … text of tokens before this is out
        self._held = ""
        self.stopped = False

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def push(self, token: int) -> str:
        """Add a token; return the text that is now certain. Sets `stopped` at a stop string."""
        self._tokens.append(token)
        return self._release(self._new_text(final=False), final=False)

    def finish(self) -> str:
        """Text still held back when generation ends for another reason than a stop string."""
        return "" if self.stopped else self._release(self._new_text(final=True), final=True)

    def _new_text(self, *, final: bool) -> str:
        before = self._decode(self._tokens[self._window_start : self._emitted_until])
        now = self._decode(self._tokens[self._window_start :])
        if now == before or (now.endswith(INCOMPLETE) and not final):
            return ""
        self._window_start = self._emitted_until
        self._emitted_until = len(self._tokens)
        # not the length of `before`: half a character at its end is decoded otherwise when whole
        return now[_shared(before, now) :]

    def _release(self, text: str, *, final: bool) -> str:
        if not self._stop:
            return text
        self._held += text
        found = [at for s in self._stop if (at := self._held.find(s)) >= 0]
        if found:
            self.stopped = True
            out, self._held = self._held[: min(found)], ""
            return out
        keep = 0 if final else max(_overlap(self._held, s) for s in self._stop)
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out


def _shared(a: str, b: str) -> int:
    """Length of the longest text with which both begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper start of `stop`."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
