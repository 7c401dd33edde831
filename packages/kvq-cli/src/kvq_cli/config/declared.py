"""The format of the cache that a checkpoint declares, and what is made of it.

Quantization tools write it into config.json's quantization_config: as `kv_cache_scheme`
(compressed-tensors, and ModelOpt) or as `kv_cache_quant_algo` (ModelOpt).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvq_cli.quoting import in_json

AUTO = "auto"

# (type, bits) of a value → the codec that stores it alike
_CODECS = {("float", 8): "fp8", ("float", 4): "nvfp4", ("int", 8): "q8_0", ("int", 4): "q4_0"}
_ALGORITHMS = {"FP8": ("float", 8), "NVFP4": ("float", 4), "INT8": ("int", 8)}


@dataclass(frozen=True, slots=True)
class Declared:
    """What a checkpoint declares.

    Attributes
    ----------
    words : its key and value
    codec : that stores values of this kind; None = kvq has none
    """

    words: str
    codec: str | None


def declared_cache(config: Mapping[str, Any]) -> Declared | None:
    """What a config.json declares; None = nothing."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        quantization = part.get("quantization_config")
        if not isinstance(quantization, Mapping):
            continue
        scheme = quantization.get("kv_cache_scheme")
        if scheme is not None:
            return Declared(f"kv_cache_scheme {in_json(scheme)}", _of_scheme(scheme))
        algorithm = quantization.get("kv_cache_quant_algo")
        if algorithm is not None:
            kind = _ALGORITHMS.get(str(algorithm).upper())
            words = f"kv_cache_quant_algo {in_json(algorithm)}"
            return Declared(words, None if kind is None else _CODECS[kind])
    return None


def choose_format(
    asked: str, config: Mapping[str, Any], automatic: Callable[[], tuple[str, str]]
) -> tuple[str, tuple[str, ...]]:
    """The format that a model is served in, and what the user should know of the choice.

    Parameters
    ----------
    asked : by the user; "auto" = what the checkpoint declares, or else what `automatic` gives
    automatic : gives a format that suits model and memory, and why
    """
    declared = declared_cache(config)
    says = declared and f"the checkpoint declares its KV cache's format ({declared.words})"
    if asked != AUTO:
        return asked, (f"{says}; {asked} is used, as asked",) if says else ()
    if declared is None or declared.codec is None:
        chosen, why = automatic()
        return chosen, (f"{says}, which kvq has no codec for", why) if says else (why,)
    return declared.codec, (
        f"{says}; it is stored as {declared.codec}, scaled by its own rows and not by what the "
        "checkpoint measured; --kv-cache-dtype overrides it",
    )


def _of_scheme(scheme: object) -> str | None:
    if not isinstance(scheme, Mapping):
        return None
    kind, bits = scheme.get("type"), scheme.get("num_bits")
    return _CODECS.get((kind, bits)) if isinstance(kind, str) and isinstance(bits, int) else None
