"""Puts the parts together: options in, an engine out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import torch

import kvq_codecs
from kvq_attention import support
from kvq_cli.config import (
    CacheFormat,
    ConfigError,
    ModelGeometry,
    check_format,
    geometry,
    parse_cache_dtype,
    quality_notes,
)
from kvq_cli.engine.async_engine import AsyncEngine, EngineSummary
from kvq_cli.engine.engine import Engine
from kvq_cli.engine.runner import ModelRunner
from kvq_cli.models import attention
from kvq_cli.models.convert import Progress
from kvq_cli.models.loader import load, read_config
from kvq_cli.models.source import resolve
from kvq_pools import Pool, PoolPlan, hybrid_swa, mha, pages_for_tokens, window_pages_per_request

# Share of the memory that is free once the weights are loaded which the cache may take when the
# user names no size: a CPU shares its memory with everything else, a GPU mostly does not.
MEMORY_SHARE = {"cpu": 0.25, "cuda": 0.85}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What a user chose; None = decide from the model and the machine.

    Attributes
    ----------
    num_tokens : size of the cache (tokens, a multiple of page_tokens)
    max_model_len : longest request (tokens, prompt and generated together)
    page_tokens : tokens a page
    max_prefill_tokens : most prompt tokens computed in one step
    """

    model: str
    kv_cache_dtype: str = "q8_0"
    dtype: str = "auto"
    device: str = "auto"
    num_tokens: int | None = None
    max_model_len: int | None = None
    page_tokens: int = 16
    max_running_requests: int = 16
    max_prefill_tokens: int = 512
    attention_backend: str = "auto"
    served_model_name: str | None = None

    def __post_init__(self) -> None:
        for name in ("page_tokens", "max_running_requests", "max_prefill_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.served_model_name == "":
            raise ConfigError("served_model_name is empty; give a name or leave it out")
        for name in ("num_tokens", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.num_tokens is not None and self.num_tokens % self.page_tokens:
            below = self.num_tokens // self.page_tokens * self.page_tokens
            raise ConfigError(
                f"num_tokens must be a multiple of page_tokens ({self.page_tokens}), got "
                f"{self.num_tokens}; the nearest are {below} and {below + self.page_tokens}"
            )


def build_engine(
    options: ServeOptions,
    report: Callable[[str], None] = lambda _: None,
    progress: Progress | None = None,
) -> AsyncEngine:
    """An engine ready to start.

    All that can be refused is refused before weights load: `ConfigError` and its kin say what
    was given, what is allowed and what to do. `report` hears what is being done.
    """
    source = resolve(options.model)
    config = read_config(source)
    shape = geometry(config)
    format_ = parse_cache_dtype(options.kv_cache_dtype)
    check_format(shape, format_)
    device = _device(options.device)
    dtype = _dtype(options.dtype, device, config)
    backend = support.choose(
        options.attention_backend,
        k=format_.k,
        v=format_.v,
        head_dim=shape.head_dim,
        device=device.type,
        features=_features(shape),
    )
    context = options.max_model_len or shape.max_position
    if context > shape.max_position:
        raise ConfigError(
            f"max_model_len {context} exceeds the {shape.max_position} positions the model "
            f"was made for; use at most {shape.max_position}"
        )
    plan = make_plan(shape, format_, options)

    report(f"loading {source.name} ({options.model})")
    loaded = load(source, dtype=dtype, device=device, progress=progress)
    attention.install(loaded.model)
    pages = _num_pages(plan, options, context, device)
    pool = Pool(plan, pages, empty=lambda shape, kind: _empty(shape, kind, device))
    fits = pages * plan.page_tokens
    name = options.served_model_name or loaded.name
    engine = Engine(
        ModelRunner(loaded.model, loaded.geometry, pool, backend=backend),
        loaded.tokenizer,
        max_model_len=min(context, fits),
        max_running_requests=options.max_running_requests,
        max_prefill_tokens=options.max_prefill_tokens,
    )
    bf16 = make_plan(shape, CacheFormat("bf16", "bf16"), options)
    return AsyncEngine(
        engine,
        EngineSummary(
            model_name=name,
            cache_dtype=str(format_),
            bytes_per_token=plan.token_bytes,
            bf16_bytes_per_token=bf16.token_bytes,
            num_tokens=fits,
            max_model_len=engine.max_model_len,
            cache_bytes=pool.nbytes,
            backend=f"{backend} attention, {dtype} weights on {device}".replace("torch.", ""),
            notes=(*quality_notes(shape, format_), *_capacity_notes(context, fits)),
        ),
    )


def make_plan(shape: ModelGeometry, format_: CacheFormat, options: ServeOptions) -> PoolPlan:
    """The pool of a model: one tier, or two when only some layers slide a window.

    A model whose every layer slides a window keeps all tokens in one tier: its pages could be
    released, but then nothing would bound a request's length but the window.
    """
    k, v = kvq_codecs.get(format_.k).spec, kvq_codecs.get(format_.v).spec
    common: dict[str, Any] = {
        "kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "k": k,
        "v": v,
        "page_tokens": options.page_tokens,
    }
    window = shape.window
    if window is None or not shape.full_layers:
        return mha(layers=tuple(range(shape.num_layers)), **common)
    per_request = window_pages_per_request(window, options.max_prefill_tokens, options.page_tokens)
    return hybrid_swa(
        full_layers=shape.full_layers,
        window_layers=shape.window_layers,
        window=window,
        window_pages=per_request * options.max_running_requests,
        **common,
    )


def _features(shape: ModelGeometry) -> list[str]:
    """What the attention of a model needs beside the plain form, in kvq_attention's words."""
    needs = {
        "gqa": shape.num_heads != shape.num_kv_heads,
        "window": shape.window is not None,
        "softcap": shape.softcap is not None,
        "sinks": shape.has_sinks,
    }
    return [name for name, needed in needs.items() if needed]


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda was asked for and torch finds none; use --device cpu")
    return torch.device(name)


def _dtype(name: str, device: torch.device, config: Any) -> torch.dtype:
    if name == "auto":
        # CPUs compute float32 fastest and most exactly; GPUs run what the model was trained in
        if device.type == "cpu":
            return torch.float32
        declared = getattr(config, "dtype", None)
        return next((d for d in DTYPES.values() if d == declared), torch.bfloat16)
    if name not in DTYPES:
        raise ConfigError(f"dtype must be auto or one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def _num_pages(plan: PoolPlan, options: ServeOptions, context: int, device: torch.device) -> int:
    """Pages of the tiers that grow: as asked, or what memory allows and requests can use."""
    free, share = _free_bytes(device), MEMORY_SHARE[device.type]
    if options.num_tokens is not None:
        pages = options.num_tokens // options.page_tokens
        needed = plan.nbytes(pages)
        if needed > free:
            raise ConfigError(
                f"a cache of {options.num_tokens} tokens needs {needed:,} bytes "
                f"({plan.page_bytes:,} a page, {plan.fixed_bytes:,} fixed) and {free:,} are free "
                f"on {device}; at most {plan.pages_for(free) * plan.page_tokens} tokens fit"
            )
        return pages
    useful = pages_for_tokens(context, plan.page_tokens) * options.max_running_requests
    budget = int(free * share)
    if plan.nbytes(1) > budget:
        raise ConfigError(
            f"{share:.0%} of the {free:,} bytes free on {device} is {budget:,}, less than the "
            f"smallest cache ({plan.nbytes(1):,} bytes: {plan.fixed_bytes:,} fixed and "
            f"{plan.page_bytes:,} a page); free memory, lower --max-running-requests or choose "
            "a smaller --kv-cache-dtype"
        )
    return min(plan.pages_for(budget), useful)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def _empty(shape: tuple[int, ...], kind: str, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, kind), device=device)


def _capacity_notes(context: int, fits: int) -> tuple[str, ...]:
    if fits >= context:
        return ()
    return (
        f"only {fits} of the model's {context} tokens of context fit in the cache: requests are "
        "limited to that; choose a smaller --kv-cache-dtype or a larger --num-tokens",
    )
