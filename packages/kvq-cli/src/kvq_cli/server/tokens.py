"""What single tokens say: text, and bytes where they hold a part of a character only."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from kvq_cli.engine.params import TokenLogprobs
from kvq_cli.server.answers import ChatLogprobs, TextLogprobs, TokenLogprob, TopLogprob

LEAST = -9999.0  # of a token without probability, as OpenAI has it; JSON has no infinity
BYTE = re.compile("<0x([0-9A-F]{2})>")


class TokenTexts:
    """The bytes of a tokenizer's tokens; together they are the bytes of the text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        self._by_bytes = decoder is not None and b"ByteLevel" in decoder.__getstate__()

    def __call__(self, token: int) -> bytes:
        """The bytes of one token."""
        if token not in self._known:
            self._known[token] = self._find(token)
        return self._known[token]

    def _find(self, token: int) -> bytes:
        find = getattr(self._tokenizer, "convert_ids_to_tokens", None)
        if find is None:
            return str(self._tokenizer.decode([token])).encode()
        name: str = find(token) or ""  # a vocabulary may have gaps
        if self._by_bytes:
            letters = byte_letters()
            return bytes(letters[c] for c in name) if letters.keys() >= {*name} else name.encode()
        if byte := BYTE.fullmatch(name):
            return bytes.fromhex(byte[1])
        return name.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()


@cache
def byte_letters() -> dict[str, int]:
    """The letters that byte-level vocabularies are written with, and the byte that each means.

    Those bytes that print as Latin-1 are their own letters; the others take what follows it.
    """
    prints = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in prints)
    return {chr(b): b for b in prints} | {chr(256 + n): b for n, b in enumerate(others)}


class LogprobTeller:
    """Puts one choice's logprobs into OpenAI's shapes, as they come."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._characters = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def chat(self, found: Sequence[TokenLogprobs]) -> ChatLogprobs:
        """For /v1/chat/completions."""
        return ChatLogprobs(
            content=[
                TokenLogprob(
                    **self._named(each.token_id, each.logprob),
                    top_logprobs=[TopLogprob(**self._named(*pair)) for pair in each.top],
                )
                for each in found
            ]
        )

    def text(self, found: Sequence[TokenLogprobs]) -> TextLogprobs:
        """For /v1/completions; tokens that are no whole characters are called `bytes:\\x…`."""
        told = TextLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for each in found:
            told.tokens.append(self._name(each.token_id))
            told.token_logprobs.append(max(each.logprob, LEAST))
            # the chosen one is among them, as in OpenAI's answers
            pairs = (*each.top, (each.token_id, each.logprob))
            told.top_logprobs.append(
                {self._name(token): max(value, LEAST) for token, value in pairs}
            )
            told.text_offset.append(self._characters)
            self._characters += len(self._decoder.decode(self._texts(each.token_id)))
        return told

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        content = self._texts(token)
        return {
            "token": content.decode("utf-8", "replace"),
            "logprob": max(logprob, LEAST),
            "bytes": list(content),
        }

    def _name(self, token: int) -> str:
        content = self._texts(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
