"""What of an engine is measured."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvq_attention.bench.cases import Case, Extend, Shape, parse_cases, parse_extends, parse_shape
from kvq_cli.config import ConfigError

# Of a model whose weights are random: layers × hidden size × inner size of the feed-forward part
SIZE = re.compile(r"([1-9]\d{0,3})[x×]([1-9]\d{0,5})[x×]([1-9]\d{0,5})")
VOCABULARY = 32_000
LEAST_PROMPTS, MOST_PROMPTS = 5, 10  # timed, of a case


@dataclass(frozen=True, slots=True)
class RandomModel:
    """A Llama whose weights are random: the time of a step does not depend on what they are."""

    layers: int
    hidden: int
    inner: int
    shape: Shape

    @classmethod
    def parse(cls, size: str, shape: str) -> RandomModel:
        """LAYERSxHIDDENxINNER, and HEADS/KV_HEADSxHEAD_DIM."""
        found = SIZE.fullmatch(size)
        if found is None:
            raise ConfigError(
                f"random model {size!r} must be LAYERSxHIDDENxINNER, such as 32x4096x11008"
            )
        layers, hidden, inner = map(int, found.groups())
        layer = parse_shape(shape)
        if layer.dim % 2:
            raise ConfigError(
                f"shape {layer.name}: a Llama turns pairs of a row's values, so that head_dim must "
                f"be even, got {layer.dim}"
            )
        return cls(layers, hidden, inner, layer)

    @property
    def name(self) -> str:
        """Such as random Llama 32x4096x11008, 32/8x128."""
        return f"random Llama {self.layers}x{self.hidden}x{self.inner}, {self.shape.name}"


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """The measurements of one run.

    Attributes
    ----------
    model : a name or a path, or a random one
    formats : of the cache, as `kvq serve` takes them
    cases : steps: decodes of so many requests with so many tokens, prompts' chunks over a past
    graph_rows : most decodes of a step that CUDA graphs replay; 0 = none, None = as served
    graph_tokens : most tokens of a prompt that they replay; 0 = none, None = as served
    compile : the small parts of the model
    peer : whether transformers' own generate decodes and computes whole prompts, too
    extend_routes : whether prompts over a past are also computed by each route of extend
    max_model_len : longest request (tokens) that the engine allows, for which its CUDA graphs are
        made, too; None = a case's own
    repeat : steps of decodes that are timed; of prompts see `prompt_steps`
    """

    model: str | RandomModel
    formats: tuple[str, ...]
    cases: tuple[Case | Extend, ...]
    device: str = "auto"
    dtype: str = "auto"
    attention_backend: str = "auto"
    page_tokens: int = 16
    graph_rows: int | None = None
    graph_tokens: int | None = None
    compile: bool = False
    peer: bool = False
    extend_routes: bool = False
    max_model_len: int | None = None
    repeat: int = 20

    @property
    def prompt_steps(self) -> int:
        """Of each case and route that are timed: enough for a median, few where they are long."""
        return max(LEAST_PROMPTS, min(self.repeat, MOST_PROMPTS))

    def compares(self, case: Case | Extend) -> bool:
        """Whether a case is computed by each route of extend."""
        return self.extend_routes and isinstance(case, Extend) and case.past > 0


def parse_steps(text: str) -> tuple[Case | Extend, ...]:
    """BATCHxCONTEXT and NEW+PAST, separated by commas."""
    found: list[Case | Extend] = []
    for part in text.split(","):
        found += parse_extends(part) if "+" in part else parse_cases(part)
    return tuple(dict.fromkeys(found))
