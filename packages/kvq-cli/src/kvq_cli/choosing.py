"""The cache of a model: its plan, and backends that serve it and compute what they must."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from kvq_attention import UnsupportedError, support
from kvq_cli import verifying
from kvq_cli.config import (
    Formats,
    ModelGeometry,
    build_plan,
    check_format,
    distinct,
    parse_formats,
)
from kvq_cli.engine.cache import CacheChoice
from kvq_cli.serve_options import ServeOptions
from kvq_pools import PoolPlan

Chooser = Callable[[str], support.Choice]


def choose_cache(
    cache_dtype: str,
    shape: ModelGeometry,
    options: ServeOptions,
    device: torch.device,
    dtype: torch.dtype,
) -> CacheChoice:
    """A model's cache in a format, or a `ValueError` that says why it cannot be served."""
    formats = parse_formats(cache_dtype, shape)
    check_format(shape, formats)
    choose = _chooser(formats, shape, options, device, dtype)
    backends = choose(options.attention_backend)
    if options.prefill_reads == "packed":
        choose(f"decode={backends.extend}")  # by which a prefill reads, or it is refused
    return CacheChoice(str(formats), make_plan(shape, formats, options), backends)


def checked_cache(
    choice: CacheChoice,
    shape: ModelGeometry,
    options: ServeOptions,
    device: torch.device,
    dtype: torch.dtype,
) -> CacheChoice:
    """The same once each of its kernels was tried, in a small form of the model's layers.

    `verifying.KernelFailed` names a kernel that does not compute what it must. With
    `on_failed_check="fallback"` the next backend that passes takes its place; the check says so.
    """
    formats = parse_formats(choice.cache_dtype, shape)
    cases = verifying.cases(shape, formats, options.page_tokens, options.prefill_reads)
    choose = _chooser(formats, shape, options, device, dtype)

    def following(op: str, failed: Mapping[str, str]) -> str | None:
        """The next backend that serves an op, those aside that failed."""
        asked = [op]
        if op == "extend" and options.prefill_reads == "packed":
            asked.append("decode")
        for name in support.BACKENDS:
            if name in failed or (name, device.type) in support.NEVER_AUTO:
                continue
            try:
                choose(",".join(f"{each}={name}" for each in asked))
            except UnsupportedError:
                continue
            return name
        return None

    backends, check = verifying.verify(
        choice.backends,
        [replace(case, layer=case.layer.small()) for case in cases],
        device.type,
        dtype,
        following,
        fallback=options.on_failed_check == "fallback",
    )
    return replace(choice, backends=backends, check=check)


def _chooser(
    formats: Formats,
    shape: ModelGeometry,
    options: ServeOptions,
    device: torch.device,
    dtype: torch.dtype,
) -> Chooser:
    """What chooses a model's backends by what was asked for."""

    def choose(backend: str) -> support.Choice:
        return support.choose(
            backend,
            formats=[(cache.k, cache.v) for cache in distinct(formats)],
            head_dim=shape.head_dim,
            page_tokens=options.page_tokens,
            device=device.type,
            dtype=dtype,
            features=_features(shape),
            group=shape.num_heads // shape.num_kv_heads,
        )

    return choose


def make_plan(shape: ModelGeometry, formats: Formats, options: ServeOptions) -> PoolPlan:
    """The pool of a model under the options."""
    return build_plan(
        shape,
        formats,
        page_tokens=options.page_tokens,
        max_running_requests=options.max_running_requests,
        max_prefill_tokens=options.max_prefill_tokens,
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
