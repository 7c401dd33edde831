"""What a model asks of its cache, in kvq's own words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvq_cli.config.errors import UnsupportedModel

Family = Literal["mha", "hybrid_swa", "mla", "dsa", "qsa"]


@dataclass(frozen=True, slots=True)
class Latent:
    """Latent attention: one row a token, whose first `dim` values are the value as well.

    Attributes
    ----------
    dim : compressed values of a row
    rope_dim : values behind them that carry the position
    """

    dim: int
    rope_dim: int

    @property
    def width(self) -> int:
        """Values of a row."""
        return self.dim + self.rope_dim


@dataclass(frozen=True, slots=True)
class Index:
    """Keys by which sparse attention selects what it reads; always in a 16-bit format.

    Attributes
    ----------
    layers : global ids of the layers that score with keys of their own
    dim : values of a key
    ratio : tokens that share a key
    codec : the model's 16-bit type
    """

    layers: tuple[int, ...]
    dim: int
    ratio: int = 1
    codec: Literal["bf16", "fp16"] = "bf16"


@dataclass(frozen=True, slots=True)
class State:
    """Linear-attention layers: a state a request instead of rows a token.

    Attributes
    ----------
    layers : global ids
    key_heads, value_heads, key_dim, value_dim : of one layer
    conv_tokens : tokens that the short convolution looks back on
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_tokens: int

    @property
    def channels(self) -> int:
        """Inputs of the convolution at a token: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def request_bytes(self, ranks: int = 1, value_bytes: int = 2) -> int:
        """Bytes of one request on one rank: fp32 matrices, inputs of the convolution."""
        matrix = 4 * self.value_heads * self.key_dim * self.value_dim
        inputs = value_bytes * self.conv_tokens * self.channels
        return len(self.layers) * (matrix + inputs) // ranks


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """All that the cache, the engine and the server know about a model.

    Attributes
    ----------
    num_kv_heads, head_dim : of the rows of full-attention layers; 1 and the row's width if latent
    max_position : most tokens of one sequence
    windows : per layer, the positions a query sees, its own included; None = all
    softcap : attention logits s become softcap·tanh(s/softcap); None = as they are
    has_sinks : each query head has a learned logit in its softmax denominator
    eos_token_ids : a generated token among these ends the text
    feed_forward : values a token takes at the widest point of a layer's feed-forward part
    experts_per_token : feed-forward parts that see a token; 0 = there are no experts
    window_kv_heads, window_head_dim : of sliding-window layers, where they differ
    latent, index, state : of the families that have them
    sharing_layers : layers that read an earlier layer's cache and have none of their own
    short_positions : up to which rotary embeddings were trained at first, where longer requests
        need other frequencies (longrope); None = they are the same for all
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
    feed_forward: int = 0
    experts_per_token: int = 0
    window_kv_heads: int | None = None
    window_head_dim: int | None = None
    latent: Latent | None = None
    index: Index | None = None
    state: State | None = None
    sharing_layers: tuple[int, ...] = ()
    short_positions: int | None = None

    def __post_init__(self) -> None:
        if len(self.windows) != self.num_layers:
            raise UnsupportedModel(
                f"{self.model_type}: {self.num_layers} layers and {len(self.windows)} windows"
            )
        if len({w for w in self.windows if w is not None}) > 1:
            raise UnsupportedModel(
                f"{self.model_type}: its layers have windows of different sizes "
                f"{sorted({w for w in self.windows if w is not None})}; one size is supported"
            )
        for heads in (self.num_kv_heads, self.window_kv_heads or self.num_kv_heads):
            if self.num_heads % heads:
                raise UnsupportedModel(
                    f"{self.model_type}: {self.num_heads} query heads do not share "
                    f"{heads} key/value heads evenly"
                )
        if not self.cached_layers:
            raise UnsupportedModel(f"{self.model_type}: no layer of it has a cache of tokens")

    @property
    def family(self) -> Family:
        """Which of kvq_pools' families holds the cache."""
        if self.latent is not None:
            return "mla" if self.index is None else "dsa"
        if self.index is not None:
            return "qsa"
        return "mha" if self.window is None else "hybrid_swa"

    @property
    def cached_layers(self) -> tuple[int, ...]:
        """Layers that store rows of every token, or of those in their window."""
        without = {*self.sharing_layers, *(self.state.layers if self.state else ())}
        return tuple(i for i in range(self.num_layers) if i not in without)

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Cached layers whose queries see every earlier position."""
        return tuple(i for i in self.cached_layers if self.windows[i] is None)

    @property
    def window_layers(self) -> tuple[int, ...]:
        """Cached layers whose queries see `window` positions."""
        return tuple(i for i in self.cached_layers if self.windows[i] is not None)

    @property
    def window(self) -> int | None:
        """The size of the window of `window_layers`; None when there are none."""
        return next((self.windows[i] for i in self.window_layers), None)

    @property
    def row_dims(self) -> tuple[int, ...]:
        """Widths of the rows that a codec must store."""
        dims = {self.head_dim}
        if self.window_layers and self.window_head_dim is not None:
            dims = {self.window_head_dim, *(dims if self.full_layers else ())}
        return tuple(sorted(dims))
