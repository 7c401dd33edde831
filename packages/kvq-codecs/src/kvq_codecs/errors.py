"""What can be wrong with what a caller hands to a codec."""

from __future__ import annotations

from typing import Any


class CodecError(ValueError):
    """Base of every error this package raises on bad input."""


class UnknownCodecError(CodecError):
    """No codec is registered under the name given."""


class RowError(CodecError):
    """Rows that a codec cannot encode: head_dim, dtype or shape."""


class PlaneError(CodecError):
    """Planes or blocks that do not match a codec's layout: name, shape or dtype."""


def check_kind(value: object, kind: Any, what: str, error: type[CodecError]) -> None:
    """Raise `error` unless `value` is a `kind`; the message starts with `what`."""
    if not isinstance(value, kind):
        raise error(f"{what} must be of type {kind.__name__}, got {type(value).__name__}")
