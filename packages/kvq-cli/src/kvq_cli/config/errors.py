"""What is wrong with a model, a format or an option."""

from __future__ import annotations


class ConfigError(ValueError):
    """What the user asks for cannot be done; the message says what can."""


class UnsupportedModel(ConfigError):
    """A model whose cache kvq cannot hold; the message gives the reason and what is supported."""


class CacheFormatError(ConfigError):
    """A cache format that does not exist or does not fit the model."""
