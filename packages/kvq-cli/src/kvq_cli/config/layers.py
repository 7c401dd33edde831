"""What each family of models has beside plain keys and values.

One function a family reads its own keys: which layers slide a window, keep a state, share another
layer's cache, or select through an index. Each returns fields of `ModelGeometry`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from kvq_cli.config.errors import ConfigError, UnsupportedModel
from kvq_cli.config.geometry import Index, Latent, State
from kvq_cli.quoting import in_json

Keys = Mapping[str, Any]


# A setting beyond these is a slip: no model comes near, and tables have a row for each layer.
MOST, MOST_OF = 10**12, {"num_hidden_layers": 10_000}


def whole(keys: Keys, key: str, default: int | None = None, *, least: int = 1) -> int:
    """A positive integer; `default` stands for null."""
    value, most = keys.get(key), MOST_OF.get(key, MOST)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(
            f"{keys['model_type']}: {key} must be a whole number ≥ {least}, got {in_json(value)}"
        )
    if value > most:
        raise ConfigError(
            f"{keys['model_type']}: {key} must be at most {most:,}, got {in_json(value)}"
        )
    return value


def count(keys: Keys, key: str) -> int:
    """A number of things of which there may be none: null and absent are 0."""
    return whole(keys, key, 0, least=0)


def _types(keys: Keys, derived: Callable[[int], str], allowed: Sequence[str]) -> list[str]:
    """Each layer's type: as the config lists them, or as its family derives them."""
    layers = whole(keys, "num_hidden_layers")
    types = keys.get("layer_types")
    if types is None:
        types = [derived(layer) for layer in range(layers)]
    if not isinstance(types, list | tuple) or not all(isinstance(kind, str) for kind in types):
        raise ConfigError(
            f"{keys['model_type']}: layer_types must be a list with the name of each layer's type, "
            f"got {in_json(types)}"
        )
    strange = sorted(set(types) - set(allowed), key=str)
    if strange:
        raise UnsupportedModel(
            f"{keys['model_type']}: layers of type {', '.join(map(str, strange))} are not known "
            f"in this family; known are {', '.join(allowed)}"
        )
    if len(types) != layers:
        raise ConfigError(
            f"{keys['model_type']}: layer_types names {len(types)} layers and "
            f"num_hidden_layers says {layers}"
        )
    return list(types)


def _window(keys: Keys) -> int | None:
    """The width of the window; configs write none as null or 0, or switch it off by a flag."""
    if not keys.get("use_sliding_window", True):
        return None
    value = keys.get("sliding_window")
    return whole(keys, "sliding_window") if value else None


def _plain(keys: Keys) -> dict[str, Any]:
    return {"windows": (None,) * whole(keys, "num_hidden_layers")}


def _one_window(keys: Keys) -> dict[str, Any]:
    return {"windows": (_window(keys),) * whole(keys, "num_hidden_layers")}


def _some_windows(slides: Callable[[Keys, int], bool]) -> Callable[[Keys], dict[str, Any]]:
    """Layers that slide one by one: as listed in layer_types, else those that `slides` names."""

    def windows(keys: Keys) -> dict[str, Any]:
        sizes = {"full_attention": None, "sliding_attention": _window(keys)}

        def derived(layer: int) -> str:
            return "sliding_attention" if slides(keys, layer) else "full_attention"

        return {"windows": tuple(sizes[t] for t in _types(keys, derived, tuple(sizes)))}

    return windows


def _without_rope(keys: Keys, layer: int) -> bool:
    """SmolLM3: layers without rotary embedding slide."""
    listed = keys.get("no_rope_layers")
    rotary = listed[layer] if listed else (layer + 1) % whole(keys, "no_rope_layer_interval")
    return _window(keys) is not None and not rotary


def _from_layer(keys: Keys, layer: int) -> bool:
    """Qwen 2 and 3: the first `max_window_layers` see everything."""
    return _window(keys) is not None and layer >= keys["max_window_layers"]


def _even_up_to(keys: Keys, layer: int) -> bool:
    return _window(keys) is not None and layer % 2 == 0 and layer < keys["max_window_layers"]


def _even(keys: Keys, layer: int) -> bool:
    return layer % 2 == 0


def _but_every(key: str) -> Callable[[Keys, int], bool]:
    return lambda keys, layer: (layer + 1) % whole(keys, key) != 0


def _gemma4(keys: Keys) -> dict[str, Any]:
    """Full layers have heads of their own; the last layers read earlier ones' cache."""
    layers = whole(keys, "num_hidden_layers")
    keys = {**keys, "sliding_window_pattern": 6}
    windows = list(_some_windows(_but_every("sliding_window_pattern"))(keys)["windows"])
    windows[-1] = None  # the last layer sees everything, whatever is listed
    heads = whole(keys, "num_key_value_heads")
    full = {"head_dim": whole(keys, "global_head_dim"), "num_key_value_heads": heads}
    if keys.get("attention_k_eq_v") and keys.get("num_global_key_value_heads") is not None:
        full["num_key_value_heads"] = whole(keys, "num_global_key_value_heads")
    full |= _own_heads(keys)
    sharing = count(keys, "num_kv_shared_layers")
    if sharing >= layers:
        raise ConfigError(
            f"{keys['model_type']}: num_kv_shared_layers must be less than the {layers} layers, "
            f"got {in_json(sharing)}"
        )
    return {
        "windows": tuple(windows),
        "num_kv_heads": full["num_key_value_heads"],
        "head_dim": full["head_dim"],
        "window_kv_heads": heads,
        "window_head_dim": whole(keys, "head_dim"),
        "sharing_layers": tuple(range(layers - sharing, layers)),
    }


def _own_heads(keys: Keys) -> dict[str, int]:
    """What Gemma 4's per_layer_config says of its full layers; one shape for all is supported."""
    listed = keys.get("per_layer_config") or {}
    if not isinstance(listed, Mapping) or not all(isinstance(s, Mapping) for s in listed.values()):
        raise ConfigError(
            f"{keys['model_type']}: per_layer_config must map layers to their settings, "
            f"got {in_json(listed)}"
        )
    name = {"model_type": keys["model_type"]}
    shapes = [
        {
            key: whole({**settings, **name}, key)
            for key in ("head_dim", "num_key_value_heads")
            if key in settings
        }
        for settings in listed.values()
    ]
    if any(shape != shapes[0] for shape in shapes):
        raise UnsupportedModel(
            f"{keys['model_type']}: per_layer_config gives its layers different heads; "
            f"one shape is supported, got {in_json(listed)}"
        )
    return shapes[0] if shapes else {}


def _linear(keys: Keys, cached: Sequence[str] = ("full_attention",)) -> dict[str, Any]:
    """Qwen3-Next and Qwen3.5: every fourth layer caches, the others keep a state."""
    interval = whole(keys, "full_attention_interval")

    def derived(layer: int) -> str:
        return "linear_attention" if (layer + 1) % interval else cached[0]

    types = _types(keys, derived, ("linear_attention", *cached))
    layers = tuple(i for i, kind in enumerate(types) if kind == "linear_attention")
    state = State(
        layers,
        key_heads=whole(keys, "linear_num_key_heads"),
        value_heads=whole(keys, "linear_num_value_heads"),
        key_dim=whole(keys, "linear_key_head_dim"),
        value_dim=whole(keys, "linear_value_head_dim"),
        conv_tokens=whole(keys, "linear_conv_kernel_dim"),
    )
    return {**_plain(keys), "state": state if layers else None}


def _qsa(keys: Keys) -> dict[str, Any]:
    """Qwen4-exp: full layers select through one key for each group of tokens."""
    # one kind of layer by three names: transformers renamed it between releases
    facts = _linear(keys, ("indexed_attention", "qwen_sparse_attention", "full_attention"))
    given = [k for k in ("indexer_head_dim", "indexer_compress_ratio") if keys.get(k) is not None]
    if len(given) < 2:
        raise ConfigError(
            f"{keys['model_type']}: this config does not say how its sparse attention indexes "
            f"tokens: it needs indexer_head_dim and indexer_compress_ratio, and has "
            f"{' and '.join(given) or 'neither'}. Give the config.json of the model itself"
        )
    without = set(facts["state"].layers if facts["state"] else ())
    return {
        **facts,
        "index": Index(
            tuple(i for i in range(whole(keys, "num_hidden_layers")) if i not in without),
            whole(keys, "indexer_head_dim"),
            whole(keys, "indexer_compress_ratio"),
            _index_codec(keys),
        ),
    }


def _latent(keys: Keys) -> dict[str, Any]:
    """DeepSeek-V3: one compressed row a token, shared by all heads."""
    latent = Latent(whole(keys, "kv_lora_rank"), whole(keys, "qk_rope_head_dim"))
    return {**_plain(keys), "num_kv_heads": 1, "head_dim": latent.width, "latent": latent}


def _sparse_latent(keys: Keys) -> dict[str, Any]:
    """DeepSeek-V3.2 and GLM-MoE-DSA: latent rows, read where an index key scores high."""
    layers = range(whole(keys, "num_hidden_layers"))
    types = keys.get("indexer_types")
    if types is None:
        pattern = keys.get("index_topk_pattern")
        if pattern is not None:
            types = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
        else:
            every = max(keys.get("index_topk_freq") or 1, 1)
            offset = keys.get("index_skip_topk_offset") or 0
            types = ["shared" if max(i - offset + 1, 0) % every else "full" for i in layers]
    if len(types) != len(layers) or not set(types) <= {"full", "shared"} or types[0] != "full":
        raise ConfigError(
            f"{keys['model_type']}: indexer_types must say full or shared for each of "
            f"{len(layers)} layers, the first of them full; got {types}"
        )
    own = tuple(i for i in layers if types[i] == "full")
    index = Index(own, whole(keys, "index_head_dim"), codec=_index_codec(keys))
    return {**_latent(keys), "index": index}


def _index_codec(keys: Keys) -> Literal["bf16", "fp16"]:
    """The 16-bit type of the model; index keys are kept in it."""
    return "fp16" if (keys.get("dtype") or keys.get("torch_dtype")) == "float16" else "bf16"


FAMILIES: Mapping[str, Callable[[Keys], dict[str, Any]]] = {
    "llama": _plain,
    "smollm3": _some_windows(_without_rope),
    "mistral": _one_window,
    "qwen2": _some_windows(_from_layer),
    "qwen2_moe": _some_windows(_even_up_to),
    "qwen3": _some_windows(_from_layer),
    "qwen3_moe": _one_window,
    "gemma2": _some_windows(_even),
    "gemma3_text": _some_windows(_but_every("sliding_window_pattern")),
    "gpt_oss": _some_windows(_even),
    "phi3": _one_window,
    "olmo2": _plain,
    "granite": _plain,
    "gemma4_text": _gemma4,
    "qwen3_next": _linear,
    "qwen3_5_text": _linear,
    "qwen3_5_moe_text": _linear,
    "qwen4_exp_text": _qsa,
    "deepseek_v3": _latent,
    "deepseek_v32": _sparse_latent,
    "glm_moe_dsa": _sparse_latent,
}
