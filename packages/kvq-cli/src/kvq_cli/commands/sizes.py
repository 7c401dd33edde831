"""Numbers of tokens as people write them."""

from __future__ import annotations

import re

FACTORS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 2**10, "mi": 2**20, "gi": 2**30}
GRAMMAR = "a number, with k (1,000), m, g, ki (1,024), mi or gi after it or nothing"


class SizeError(ValueError):
    """A size that cannot be read."""


def parse_tokens(text: str) -> int:
    """`200k` is 200,000 tokens, `64ki` is 65,536; `SizeError` for what is no whole number > 0."""
    match = re.fullmatch(
        r"([0-9]+)(?:\.([0-9]+))?([kmg]i?)?", text.strip().replace("_", "").lower()
    )
    if match is None:
        raise SizeError(f"{text!r} is no number of tokens: {GRAMMAR}")
    whole, decimals, unit = match[1], match[2] or "", match[3] or ""
    scale: int = 10 ** len(decimals)
    tokens, rest = divmod(int(whole + decimals) * FACTORS[unit], scale)
    if rest or not tokens:
        raise SizeError(f"{text!r} is no whole number of tokens above 0: {GRAMMAR}")
    return tokens
