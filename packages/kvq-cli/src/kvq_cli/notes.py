"""What a user should know of an engine that starts."""

from __future__ import annotations

from kvq_cli.config import ModelGeometry
from kvq_cli.engine.cache import CacheChoice
from kvq_cli.serve_options import ServeOptions


def state_notes(shape: ModelGeometry, options: ServeOptions) -> tuple[str, ...]:
    """Of a model with linear-attention layers."""
    if shape.state is None:
        if options.state_snapshots:
            return ("--state-snapshots does nothing: this model has no linear-attention layers",)
        return ()
    if options.cache_type == "none" or options.snapshots:
        return ()
    return (
        "this model's linear-attention layers keep a state that pages do not hold: with "
        "--state-snapshots 0 requests that begin alike are computed whole, as with --cache-type "
        "none",
    )


def attention_notes(choice: CacheChoice) -> tuple[str, ...]:
    """Of backends that the machine lacks, and of those that others took the place of."""
    lacking = choice.backends.passed_over
    slower = (f"not all attention is as fast as it could be: {words}" for words in lacking)
    return (*slower, *(choice.check.fallbacks if choice.check else ()))


def capacity_notes(context: int, fits: int | None) -> tuple[str, ...]:
    """Of a context (tokens) of which only so much fits; None = any request does."""
    if fits is None or fits >= context:
        return ()
    return (
        f"only {fits} of the model's {context} tokens of context fit in the cache, with what "
        "computing them takes: requests are limited to that; choose a smaller --kv-cache-dtype or "
        "a larger --num-tokens",
    )
