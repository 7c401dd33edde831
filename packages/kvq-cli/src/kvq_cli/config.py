"""What a model and a command line ask of the cache. Hugging Face key names live here only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import kvq_codecs


class ConfigError(ValueError):
    """What the user asks for cannot be done; the message says what can."""


class UnsupportedModel(ConfigError):
    """A model whose cache kvq cannot hold; the message gives the reason and what is supported."""


class CacheFormatError(ConfigError):
    """A cache format that does not exist or does not fit the model."""


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """All that the cache, the engine and the server know about a model.

    Attributes
    ----------
    windows : per layer, the positions a query sees, its own included; None = all
    softcap : attention logits s become softcap·tanh(s/softcap); None = as they are
    has_sinks : each query head has a learned logit in its softmax denominator
    eos_token_ids : a generated token among these ends the text
    max_position : most tokens of one sequence
    """

    model_type: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_position: int
    windows: tuple[int | None, ...]
    softcap: float | None = None
    has_sinks: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.windows) != self.num_layers:
            raise ValueError(f"{self.num_layers} layers need as many windows, not {self.windows}")
        if len({w for w in self.windows if w is not None}) > 1:
            raise UnsupportedModel(
                f"{self.model_type}: its layers have windows of different sizes "
                f"{sorted({w for w in self.windows if w is not None})}; one size is supported"
            )
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(
                f"{self.model_type}: {self.num_heads} query heads do not share "
                f"{self.num_kv_heads} key/value heads evenly"
            )

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers whose queries see every earlier position."""
        return tuple(i for i, w in enumerate(self.windows) if w is None)

    @property
    def window_layers(self) -> tuple[int, ...]:
        """Layers whose queries see `window` positions."""
        return tuple(i for i, w in enumerate(self.windows) if w is not None)

    @property
    def window(self) -> int | None:
        """The size of the window of `window_layers`; None when there are none."""
        return next((w for w in self.windows if w is not None), None)


def _no_windows(config: Any) -> tuple[int | None, ...]:
    return (None,) * int(config.num_hidden_layers)


def _one_window(config: Any) -> tuple[int | None, ...]:
    return (config.sliding_window or None,) * int(config.num_hidden_layers)


def _windows_by_layer(config: Any) -> tuple[int | None, ...]:
    kinds = {"full_attention": None, "sliding_attention": config.sliding_window}
    strange = sorted(set(config.layer_types) - kinds.keys())
    if strange:
        raise UnsupportedModel(
            f"{config.model_type}: layers of type {', '.join(strange)} keep no per-token keys and "
            f"values; supported are {', '.join(kinds)}"
        )
    return tuple(kinds[t] for t in config.layer_types)


def _windows_unsaid(config: Any) -> tuple[int | None, ...]:
    # transformers' module tells its mask of the window but not its attention function
    if any(_windows_by_layer(config)):
        raise _refused(config, "with a sliding window it hides the window from its attention")
    return _no_windows(config)


# Where each family's attention modules take their window from.
WINDOWS: dict[str, Callable[[Any], tuple[int | None, ...]]] = {
    "llama": _no_windows,
    "smollm3": _windows_by_layer,
    "mistral": _one_window,
    "qwen2": _windows_by_layer,
    "qwen2_moe": _windows_unsaid,
    "qwen3": _windows_by_layer,
    "qwen3_moe": _one_window,
    "gemma2": _windows_by_layer,
    "gemma3_text": _windows_by_layer,
    "gpt_oss": _windows_by_layer,
    "phi3": _one_window,
    "olmo2": _no_windows,
    "granite": _no_windows,
}

# A config that has one of these keys (not None) describes something else than plain attention.
_FOREIGN_KEYS = {
    "kv_lora_rank": "latent attention (MLA), which caches one compressed vector a token",
    "linear_num_value_heads": "linear-attention layers, which keep a state instead of a cache",
    "state_size": "state-space layers, which keep a state instead of a cache",
    "mamba_d_state": "state-space layers, which keep a state instead of a cache",
    "index_topk": "sparse attention, which needs a cache of index keys too",
}


def geometry(hf_config: Any) -> ModelGeometry:
    """The geometry of a transformers config; a multimodal one gives its text model's.

    Raises
    ------
    UnsupportedModel : with the reason and the supported families
    """
    if getattr(hf_config, "is_encoder_decoder", False):
        raise _refused(hf_config, "an encoder-decoder model has cross-attention caches")
    config = hf_config.get_text_config()
    for key, reason in _FOREIGN_KEYS.items():
        if getattr(config, key, None) is not None:
            raise _refused(config, f"it has {reason}")
    if config.model_type not in WINDOWS:
        raise _refused(config, "this family has not been proved to work")
    if getattr(config, "use_bidirectional_attention", False):
        raise _refused(config, "its attention looks ahead, so earlier keys and values change")
    num_heads = config.num_attention_heads
    return ModelGeometry(
        model_type=config.model_type,
        num_layers=config.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_position=config.max_position_embeddings,
        windows=WINDOWS[config.model_type](config),
        softcap=getattr(config, "attn_logit_softcapping", None),
        has_sinks=config.model_type == "gpt_oss",
        eos_token_ids=token_ids(config.eos_token_id),
    )


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Token ids as configs hold them: none, one or several."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _refused(config: Any, reason: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"model type {config.model_type!r} is not supported: {reason}. "
        f"Supported: {', '.join(WINDOWS)}"
    )


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """The codecs of keys and of values."""

    k: str
    v: str

    def __str__(self) -> str:
        return self.k if self.k == self.v else f"k={self.k},v={self.v}"


def parse_cache_dtype(text: str) -> CacheFormat:
    """`q4_0` or `k=q8_0,v=q4_0` to a `CacheFormat`; `CacheFormatError` says what is allowed."""
    known = kvq_codecs.names()
    fields = [field.strip() for field in text.split(",")]
    if len(fields) == 1 and "=" not in text:
        sides = {"k": fields[0], "v": fields[0]}
    else:
        parts = [field.partition("=") for field in fields]
        sides = {side.strip(): codec.strip() for side, _, codec in parts} if len(parts) == 2 else {}
    if sides.keys() != {"k", "v"} or not set(sides.values()) <= set(known):
        raise CacheFormatError(
            f"cache dtype {text!r}: give one codec, or k=CODEC,v=CODEC, "
            f"with codecs from {', '.join(known)}"
        )
    return CacheFormat(**sides)


def check_format(model: ModelGeometry, cache: CacheFormat) -> None:
    """Raise `CacheFormatError` when a codec cannot store rows of the model's head_dim.

    Costs nothing, so it comes before weights are loaded.
    """
    dim = model.head_dim
    for side, name in (("keys", cache.k), ("values", cache.v)):
        divisor = kvq_codecs.get(name).spec.divisor
        if dim % divisor:
            fitting = (n for n in kvq_codecs.names() if dim % kvq_codecs.get(n).spec.divisor == 0)
            raise CacheFormatError(
                f"{name} cannot store the {side} of this {model.model_type} model: it codes "
                f"{divisor} values at a time and head_dim {dim} is not a multiple of {divisor}. "
                f"Codecs that store head_dim {dim}: {', '.join(fitting)}"
            )


def quality_notes(model: ModelGeometry, cache: CacheFormat) -> tuple[str, ...]:
    """Plain warnings about combinations known to give bad text."""
    if not model.model_type.startswith("gemma3"):
        return ()
    poor = sorted({name for name in (cache.k, cache.v) if name in _GEMMA3_KL})
    return tuple(
        f"{name} is known to ruin Gemma 3: on Gemma-3-270M the next-token distribution moves by a "
        f"mean KL of {_GEMMA3_KL[name]} against the fp32 cache, because a few key channels are far "
        f"larger than the rest. Safer: q8_0, q6_0 or k=q8_0,v=q4_0"
        for name in poor
    )


_GEMMA3_KL = {"iso3": 2.1, "iso4": 1.3}  # measured with both K and V in that codec
