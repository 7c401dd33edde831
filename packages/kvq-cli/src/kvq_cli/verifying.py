"""Tries the kernels that a model will run, on the present device, before it is served."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from kvq_attention import selfcheck
from kvq_attention.layer import STEP_TOKENS, Layer
from kvq_attention.selfcheck import Outcome
from kvq_attention.support import Choice
from kvq_cli.config import CacheFormat, ConfigError, Formats, ModelGeometry
from kvq_cli.engine.params import AttentionCheck

# An op and the backends that failed at it → the next one that serves the model; None = no other
Following = Callable[[str, Mapping[str, str]], str | None]


class KernelFailed(ConfigError):
    """A kernel that a model needs does not compute what it must on this device."""


@dataclass(frozen=True, slots=True)
class Case:
    """A format in one kind of a model's layers.

    Attributes
    ----------
    pairs : (op that is tried, the model's op whose backend runs it)
    """

    cache: CacheFormat
    layer: Layer
    pairs: tuple[tuple[str, str], ...]

    @property
    def ops(self) -> dict[str, str]:
        """Op that is tried → the model's op whose backend runs it."""
        return dict(self.pairs)

    def given(self, backends: Choice) -> tuple[tuple[str, str], Layer, dict[str, str]]:
        """What `selfcheck` is told, with the backends that are chosen for a model."""
        by_op = {op: getattr(backends, own) for op, own in self.pairs}
        return (self.cache.k, self.cache.v), self.layer, by_op

    def run(self, backends: Choice, device: str, dtype: torch.dtype) -> Outcome:
        """Try its ops with the backends that are chosen for a model."""
        return selfcheck.run_one(*self.given(backends), device, dtype)


def cases(
    shape: ModelGeometry, formats: Formats, page_tokens: int, prefill_reads: str
) -> list[Case]:
    """Each distinct op, format and geometry that serving a model runs."""
    found: list[Case] = []
    stored = set()
    for cache, layer in dict.fromkeys(_layers(shape, formats, page_tokens)):
        rows = cache, layer.kv_heads, layer.head_dim  # all that a store sees
        ops = ["decode"] if rows in stored else ["store", "decode"]
        stored.add(rows)
        if prefill_reads != "packed":
            ops.append("extend")
        found.append(Case(cache, layer, tuple((op, op) for op in ops)))
        if prefill_reads == "packed":
            prefill = replace(layer, queries=STEP_TOKENS, any_cut=True)
            found.append(Case(cache, prefill, (("decode", "extend"),)))
    return found


def _layers(
    shape: ModelGeometry, formats: Formats, page_tokens: int
) -> Iterator[tuple[CacheFormat, Layer]]:
    """The format and the geometry of each layer that caches."""
    for index in shape.cached_layers:
        window = shape.windows[index]
        layer = Layer(
            heads=shape.num_heads,
            kv_heads=(window and shape.window_kv_heads) or shape.num_kv_heads,
            head_dim=(window and shape.window_head_dim) or shape.head_dim,
            page_tokens=page_tokens,
            window=window,
            softcap=shape.softcap,
            sinks=shape.has_sinks,
        )
        yield formats if isinstance(formats, CacheFormat) else formats.layers[index], layer


def verify(
    backends: Choice,
    tried: Sequence[Case],
    device: str,
    dtype: torch.dtype,
    following: Following,
    *,
    fallback: bool,
) -> tuple[Choice, AttentionCheck]:
    """Backends all of whose kernels compute what they must, and what was found on the way.

    Parameters
    ----------
    fallback : take the next backend that passes where one fails, rather than raise

    Raises `KernelFailed` with the kernel, its error, the tolerance and what to do.
    """
    start = time.perf_counter()
    failed: dict[str, dict[str, str]] = {}
    instead: dict[str, str] = {}
    left = list(tried)
    while problems := _problems(left, backends, device, dtype):
        for op, reason in problems.items():
            name = getattr(backends, op)
            failed.setdefault(op, {})[name] = reason
            other = following(op, failed[op])
            if other is None or not fallback:
                raise KernelFailed(_refusal(problems, op, other, failed[op]))
            first = next(iter(failed[op].values()))
            instead[op] = f"{op} is computed by {other} instead: {first}"
            backends = Choice(
                **{**backends.by_op(), op: other},
                passed_over=backends.passed_over,
                measured=tuple(each for each in backends.measured if each != op),
            )
        left = [case for case in tried if problems.keys() & set(case.ops.values())]
    kernels = sum(len(case.ops) for case in tried)
    return backends, AttentionCheck(kernels, time.perf_counter() - start, tuple(instead.values()))


def _problems(
    tried: Sequence[Case], backends: Choice, device: str, dtype: torch.dtype
) -> dict[str, str]:
    """The model's op → the first thing that is wrong with what computes it."""
    found: dict[str, str] = {}
    for case in tried:
        for op, lines in case.run(backends, device, dtype).problems_by_op.items():
            found.setdefault(case.ops.get(op, op), lines[0])
    return found


def _refusal(
    problems: Mapping[str, str], op: str, other: str | None, failed: Mapping[str, str]
) -> str:
    said = "; ".join(problems.values())
    if other is None:
        return f"{said}. No other backend serves {op} of this model here: tried {', '.join(failed)}"
    return (
        f"{said}. Answers would be wrong: name another backend (--attention-backend {op}={other}) "
        "or let --on-failed-check fallback take the next one that passes; `kvq check MODEL` tries "
        "all that a model runs"
    )
