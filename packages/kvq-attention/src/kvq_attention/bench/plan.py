"""The plan of a run: everything that decides what is measured, checked before anything is."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

import kvq_codecs
from kvq_attention import support
from kvq_attention.bench.cases import (
    Case,
    Formats,
    Shape,
    parse_cases,
    parse_counts,
    parse_formats,
    parse_shape,
)
from kvq_attention.errors import AttentionError, UnsupportedError

BASELINE = Formats("bf16", "bf16")
MIXED = Formats("q8_0", "q4_0")
DEVICES = ("cuda", "cpu")


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run measures.

    Attributes
    ----------
    device, backend : torch device type, and what the ops are told
    shape : heads and head_dim of every case
    formats : those of the cache; the first is `BASELINE`
    cases, page_tokens : decode, each case at each page size; the most important first
    store_tokens, copy_tokens : tokens of a store, and of the pages of a `copy_pages`
    repeat : timed repetitions, of which the median counts
    budget_seconds : no measurement begins after as many
    jobs : processes that compile kernels before anything is measured; 0 = each when it is needed
    """

    device: str
    backend: str
    shape: Shape
    formats: tuple[Formats, ...]
    cases: tuple[Case, ...]
    page_tokens: tuple[int, ...]
    store_tokens: tuple[int, ...]
    copy_tokens: tuple[int, ...]
    repeat: int
    budget_seconds: float
    jobs: int

    @property
    def command(self) -> str:
        """A command line that measures the same."""
        listed = {
            "device": self.device,
            "backend": self.backend,
            "shape": self.shape.name,
            "codecs": ",".join(f.name for f in self.formats),
            "cases": ",".join(case.name for case in self.cases),
            "pages": ",".join(map(str, self.page_tokens)),
            "store-tokens": ",".join(map(str, self.store_tokens)),
            "copy-tokens": ",".join(map(str, self.copy_tokens)),
            "repeat": self.repeat,
            "budget-seconds": f"{self.budget_seconds:g}",
        }
        said = " ".join(f"--{name} {value}" for name, value in listed.items())
        return f"kvq bench attention {said}"


@dataclass(frozen=True, slots=True)
class _Defaults:
    shape: str
    cases: str
    pages: str
    store_tokens: str
    copy_tokens: str
    repeat: int
    jobs: int


_DEFAULTS = {
    "cuda": _Defaults(
        shape="32/8x128",
        cases="8x32k,32x8k,1x128k,128x1k,1x4k,8x4k,32x4k",
        pages="16,64",
        store_tokens="16384,2048,256,1",
        copy_tokens="65536,1024",
        repeat=30,
        jobs=min(8, (os.cpu_count() or 1) // 2),
    ),
    "cpu": _Defaults(  # tiny: the code is tried, not the processor
        shape="4/2x128",
        cases="2x64,1x200",
        pages="16",
        store_tokens="16,1",
        copy_tokens="64",
        repeat=3,
        jobs=0,
    ),
}
_QUICK_CODECS = ("bf16", "q8_0", "q4_0")


def plan(
    *,
    device: str = "cuda",
    backend: str = support.AUTO,
    shape: str | None = None,
    codecs: str | None = None,
    cases: str | None = None,
    pages: str | None = None,
    store_tokens: str | None = None,
    copy_tokens: str | None = None,
    repeat: int | None = None,
    budget_seconds: float = 330.0,
    jobs: int | None = None,
    quick: bool = False,
) -> Plan:
    """A checked plan from what a command line says; None = as usual on the device.

    Every codec that stores the head_dim and one pair of two codecs, unless `codecs` names some;
    bf16 is always among them. `quick` keeps the first case and page size and three codecs.
    Raises `AttentionError`, or what kvq_codecs raises for a codec.
    """
    if device not in DEVICES:
        raise AttentionError(f"device {device!r} must be one of {', '.join(DEVICES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(
            "a GPU that torch can use is needed to measure attention, and torch "
            f"{torch.__version__} finds none here; --device cpu runs tiny shapes, which try the "
            "command and measure no kernel"
        )
    if backend not in (support.AUTO, *support.BACKENDS):
        names = ", ".join((support.AUTO, *support.BACKENDS))
        raise UnsupportedError(f"unknown attention backend {backend!r}; there are {names}")
    usual = _DEFAULTS[device]
    layer = parse_shape(shape or usual.shape)
    few = 1 if quick else None
    chosen = Plan(
        device,
        backend,
        layer,
        _formats(codecs, layer, quick),
        parse_cases(cases) if cases else parse_cases(usual.cases)[:few],
        parse_counts(pages, "pages") if pages else parse_counts(usual.pages, "pages")[:few],
        parse_counts(store_tokens or usual.store_tokens, "store tokens")[:few],
        parse_counts(copy_tokens or usual.copy_tokens, "copy tokens")[:few],
        usual.repeat if repeat is None else repeat,
        budget_seconds,
        usual.jobs if jobs is None else jobs,
    )
    if chosen.repeat < 1 or chosen.jobs < 0 or not chosen.budget_seconds > 0:
        raise AttentionError(
            "repeat and budget_seconds must be above 0 and jobs not below, got "
            f"{chosen.repeat}, {chosen.budget_seconds} and {chosen.jobs}"
        )
    return chosen


def _formats(codecs: str | None, shape: Shape, quick: bool) -> tuple[Formats, ...]:
    if codecs:
        wanted = parse_formats(codecs)
    else:
        names = _QUICK_CODECS if quick else kvq_codecs.names()
        fitting = [n for n in names if shape.dim % kvq_codecs.get(n).spec.divisor == 0]
        wanted = tuple(Formats(name, name) for name in fitting)
        if not quick and {MIXED.k, MIXED.v} <= set(fitting):
            wanted += (MIXED,)
    for formats in wanted:
        formats.token_bytes(shape)  # refuses a head_dim that a codec does not store
    return tuple(dict.fromkeys((BASELINE, *wanted)))
