"""Cache formats: a codec for keys and one for values, for all layers or layer by layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

import kvq_codecs
from kvq_cli.config.errors import CacheFormatError
from kvq_cli.config.geometry import ModelGeometry
from kvq_cli.quoting import quoted

FOR_ALL = "give one codec, or k=CODEC,v=CODEC"
BY_LAYER = f"{FOR_ALL}, or layer by layer LAYERS:FORMAT,LAYERS:FORMAT… with LAYERS 3, 0-1 or 2-"


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """The codecs of keys and of values."""

    k: str
    v: str

    def __str__(self) -> str:
        return self.k if self.k == self.v else f"k={self.k},v={self.v}"


@dataclass(frozen=True, slots=True)
class LayerFormats:
    """A format for each cached layer, by global layer id."""

    layers: Mapping[int, CacheFormat]

    def __str__(self) -> str:
        """In the grammar that is parsed: a range of cached layers that agree is written as one."""
        runs = groupby(sorted(self.layers), key=lambda layer: self.layers[layer])
        return ",".join(f"{_ends(list(layers))}:{cache}" for cache, layers in runs)


Formats = CacheFormat | LayerFormats


def parse_cache_dtype(text: str, allowed: str = FOR_ALL) -> CacheFormat:
    """`q4_0` or `k=q8_0,v=q4_0` to a `CacheFormat`; `CacheFormatError` says what is allowed."""
    cache = _format(text)
    if cache is None:
        raise _refused(text, "it is no format", allowed)
    return cache


def _format(text: str) -> CacheFormat | None:
    fields = [field.strip() for field in text.split(",")]
    if len(fields) == 1 and "=" not in text:
        sides = {"k": fields[0], "v": fields[0]}
    else:
        parts = [field.partition("=") for field in fields]
        sides = {side.strip(): codec.strip() for side, _, codec in parts} if len(parts) == 2 else {}
    if sides.keys() != {"k", "v"} or not set(sides.values()) <= set(kvq_codecs.names()):
        return None
    return CacheFormat(**sides)


def parse_layer_dtypes(text: str, model: ModelGeometry) -> LayerFormats:
    """`0-1:bf16,2-:k=q8_0,v=q4_0` to a format for each cached layer of the model.

    A field with a colon begins a range of global layer ids, both ends included; `2-` goes to the
    last layer. Fields without one belong to the range before them. Layers without a cache may lie
    inside a range.

    Raises
    ------
    CacheFormatError : a layer that no range names, or two; one beyond the model; a range without
        any cached layer; what is neither a range nor a format
    """
    found: dict[int, CacheFormat] = {}
    for entry in re.split(r",(?=[^,]*:)", text):
        layers, colon, format_ = entry.partition(":")
        if not colon:
            raise _refused(text, f"{quoted(entry)} names no layers")
        cache = _format(format_)
        if cache is None:
            raise _refused(text, f"{quoted(entry)} gives its layers no format that is known")
        ids = [layer for layer in _range(layers, text, model) if layer in model.cached_layers]
        if not ids:
            raise _refused(
                text,
                f"no layer of {layers.strip()} has a cache in this {model.model_type} model, "
                f"{_layers(model.cached_layers, 'has', 'have')}",
            )
        if twice := sorted(found.keys() & set(ids)):
            raise _refused(text, f"{_layers(twice, 'is', 'are')} named twice")
        found |= dict.fromkeys(ids, cache)
    if missing := sorted(set(model.cached_layers) - found.keys()):
        raise _refused(
            text,
            f"{_layers(missing, 'has', 'have')} no format and each of the model's cached layers "
            f"({_span(model.cached_layers)}) needs one",
        )
    return LayerFormats(found)


def parse_formats(text: str, model: ModelGeometry) -> Formats:
    """What `--kv-cache-dtype` takes: with a colon it is layer by layer, else one for all.

    Layers that all have one format are that format.
    """
    if ":" not in text:
        return parse_cache_dtype(text, BY_LAYER)
    formats = parse_layer_dtypes(text, model)
    first, *others = distinct(formats)
    return formats if others else first


def split_formats(text: str) -> list[str]:
    """Formats with commas between them; what is layer by layer stands alone.

    >>> split_formats("q8_0,k=q8_0,v=q4_0,iso4")
    ['q8_0', 'k=q8_0,v=q4_0', 'iso4']
    """
    if ":" in text:
        return [text]
    found: list[str] = []
    for part in text.split(","):
        pair = found and "=" in found[-1] and "," not in found[-1] and "=" in part
        found[-1:] = [f"{found[-1]},{part}"] if pair else [*found[-1:], part]
    return found


def distinct(formats: Formats) -> tuple[CacheFormat, ...]:
    """The formats that occur."""
    if isinstance(formats, CacheFormat):
        return (formats,)
    return tuple(dict.fromkeys(cache for _, cache in sorted(formats.layers.items())))


def check_format(model: ModelGeometry, formats: Formats) -> None:
    """Raise `CacheFormatError` when a codec cannot store the model's rows.

    Costs nothing, so it comes before weights are loaded.
    """
    for cache in distinct(formats):
        if model.latent is not None and cache.k != cache.v:
            raise CacheFormatError(
                f"{cache}: this {model.model_type} model stores one latent row a token, which is "
                "key and value at once; give one codec"
            )
        rows = (("keys", cache.k), ("values", cache.v))
        for what, name in rows if model.latent is None else (("latent rows", cache.k),):
            for dim in model.row_dims:
                _check_rows(model, name, what, dim)


def quality_notes(model: ModelGeometry, formats: Formats) -> tuple[str, ...]:
    """Plain warnings about combinations known to give bad text."""
    if not model.model_type.startswith("gemma3"):
        return ()
    used = {name for cache in distinct(formats) for name in (cache.k, cache.v)}
    return tuple(
        f"{name} is known to ruin Gemma 3: on Gemma-3-270M the next-token distribution moves by a "
        f"mean KL of {_GEMMA3_KL[name]} against the fp32 cache, because a few key channels are far "
        f"larger than the rest. Safer: q8_0, q6_0 or k=q8_0,v=q4_0"
        for name in sorted(used & _GEMMA3_KL.keys())
    )


_GEMMA3_KL = {"iso3": 2.2, "iso4": 1.4}  # measured with both K and V in that codec


def _check_rows(model: ModelGeometry, name: str, what: str, dim: int) -> None:
    divisor = kvq_codecs.get(name).spec.divisor
    size = f"head_dim {dim}" if model.latent is None else f"width {dim}"
    if dim % divisor:
        fitting = (n for n in kvq_codecs.names() if dim % kvq_codecs.get(n).spec.divisor == 0)
        raise CacheFormatError(
            f"{name} cannot store the {what} of this {model.model_type} model: it codes "
            f"{divisor} values at a time and {size} is not a multiple of {divisor}. "
            f"Codecs that store {size}: {', '.join(fitting)}"
        )


def _range(layers: str, text: str, model: ModelGeometry) -> range:
    match = re.fullmatch(r"\s*([0-9]{1,9})\s*(-)?\s*([0-9]{1,9})?\s*", layers)
    if match is None or (match[3] and not match[2]):
        raise _refused(text, f"{quoted(layers)} is no range of layers")
    first = int(match[1])
    last = int(match[3]) if match[3] else model.num_layers - 1 if match[2] else first
    if max(first, last) >= model.num_layers:
        raise _refused(
            text, f"{layers.strip()} is not within the model's layers, 0-{model.num_layers - 1}"
        )
    if first > last:
        raise _refused(text, f"{layers.strip()} runs backwards")
    return range(first, last + 1)


def _refused(text: str, reason: str, allowed: str = BY_LAYER) -> CacheFormatError:
    codecs = ", ".join(kvq_codecs.names())
    return CacheFormatError(f"cache dtype {quoted(text)}: {reason}; {allowed}; codecs are {codecs}")


def _layers(layers: tuple[int, ...] | list[int], one: str, several: str) -> str:
    """Layers and the verb after them."""
    return f"layer {layers[0]} {one}" if len(layers) == 1 else f"layers {_span(layers)} {several}"


def _span(layers: tuple[int, ...] | list[int]) -> str:
    """Layers in words: a range, or one by one."""
    contiguous = len(layers) == layers[-1] - layers[0] + 1
    return _ends(layers) if contiguous else ", ".join(map(str, layers))


def _ends(layers: tuple[int, ...] | list[int]) -> str:
    return str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"
