"""Numbers of tokens and of bytes as people write them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvq_cli.quoting import quoted

FACTORS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 2**10, "mi": 2**20, "gi": 2**30}
GRAMMAR = "a number, with k (1,000), m, g, ki (1,024), mi or gi after it or nothing"

BYTES = {"": 1, "b": 1}
BYTES |= {f"{prefix}b": 1000**n for n, prefix in enumerate("kmgt", 1)}
BYTES |= {f"{prefix}ib": 1024**n for n, prefix in enumerate("kmgt", 1)}
BYTES_GRAMMAR = "a number of bytes, or one with KiB, MiB, GiB, TiB, kB, MB, GB or TB after it"


class SizeError(ValueError):
    """A size that cannot be read."""


def parse_tokens(text: str) -> int:
    """`200k` is 200,000 tokens, `64ki` is 65,536; `SizeError` for what is no whole number > 0."""
    return _parse(text, FACTORS, "tokens", GRAMMAR)


def parse_lengths(text: str) -> tuple[int, ...]:
    """Several numbers of tokens, with commas between them, in rising order."""
    return tuple(sorted({parse_tokens(each) for each in text.split(",")}))


def parse_bytes(text: str) -> int:
    """`8GiB` is 8,589,934,592 bytes, `8GB` is 8,000,000,000; `SizeError` as `parse_tokens`."""
    return _parse(text, BYTES, "bytes", BYTES_GRAMMAR)


def _parse(text: str, factors: Mapping[str, int], what: str, grammar: str) -> int:
    said = text.strip().replace("_", "").lower()
    match = re.fullmatch(r"([0-9]{1,30})(?:\.([0-9]{1,30}))?([a-z]*)", said)
    if match is None or match[3] not in factors:
        raise SizeError(f"{quoted(text)} is no number of {what}: {grammar}")
    whole, decimals = match[1], match[2] or ""
    scale: int = 10 ** len(decimals)
    number, rest = divmod(int(whole + decimals) * factors[match[3]], scale)
    if rest or not number:
        raise SizeError(f"{quoted(text)} is no whole number of {what} above 0: {grammar}")
    return number
