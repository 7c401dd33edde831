"""What others wrote, as our messages and titles show it."""

from __future__ import annotations

import json

MOST = 80  # characters of an echo: enough to recognize it by


def quoted(text: str) -> str:
    """A text in quotes, with escapes, its end cut off when it is long."""
    return repr(_short(text))


def in_json(value: object) -> str:
    """A value of a config as its file writes it, likewise cut."""
    return _short(json.dumps(value, default=str, ensure_ascii=False))


def printable(text: str) -> str:
    """A text without the characters that steer terminals and that XML forbids."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def shortened(text: str, most: int) -> str:
    """A text of at most so many characters; of a longer one the middle is left out."""
    if len(text) <= most:
        return text
    head = (most - 1) // 2
    return f"{text[:head]}…{text[head + 1 - most :]}"


def _short(text: str) -> str:
    return text if len(text) <= MOST else text[: MOST - 1] + "…"
