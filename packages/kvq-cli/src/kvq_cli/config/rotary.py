"""What a config says of rotary embeddings that change with the length of a request."""

from __future__ import annotations

from collections.abc import Mapping

from kvq_cli.config.geometry import ModelGeometry
from kvq_cli.config.layers import Keys, whole

_LONGROPE = ("longrope", "su")  # by its present name and by that of older checkpoints


def short_positions(keys: Keys) -> int | None:
    """Positions that longrope's short frequencies are for; None = a model without them."""
    rope = keys.get("rope_parameters") or keys.get("rope_scaling")
    if not isinstance(rope, Mapping) or _kind(rope) not in _LONGROPE:
        return None
    key = "original_max_position_embeddings"
    settings = {**keys, key: keys.get(key) or rope.get(key)}
    return whole(settings, key, whole(keys, "max_position_embeddings"))


def _kind(rope: Keys) -> object:
    return rope.get("rope_type") or rope.get("type")


def rotary_notes(model: ModelGeometry, context: int) -> tuple[str, ...]:
    """What a user should know of the frequencies that requests of up to `context` tokens get."""
    short = model.short_positions
    if short is None or short >= model.max_position:
        return ()
    if context <= short:
        return (
            f"the model has frequencies of its own for requests of more than {short:,} tokens; "
            f"with max_model_len {context:,} none is so long, and all get the short ones",
        )
    return (
        f"requests may have {context:,} tokens, so all get the model's frequencies for more than "
        f"{short:,}; if yours are shorter, --max-model-len {short} gives them the short ones, "
        "which the model does better with",
    )
