"""The plan of a run: everything that decides what is measured, checked before anything is."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

import kvq_codecs
from kvq_attention import selfcheck, support
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
from kvq_attention.trial import Layer

BASELINE = Formats("bf16", "bf16")
MIXED = Formats("q8_0", "q4_0")
DEVICES = ("cuda", "cpu")
BUDGET_SECONDS = 330.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run measures.

    Attributes
    ----------
    device : torch device type
    backend : "auto", a name or OP=NAME,…
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

    def backend_of(self, op: str) -> str:
        """What an op is told: "auto" or a name."""
        return support.asked(self.backend, selfcheck.TRIED)[op]

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
class Defaults:
    """What is measured where a command line does not say it."""

    shape: str
    cases: str
    pages: str
    store_tokens: str
    copy_tokens: str
    repeat: int
    jobs: int


DEFAULTS = {
    "cuda": Defaults(
        shape="32/8x128",
        cases="8x32k,32x8k,1x128k,128x1k,1x4k,8x4k,32x4k",
        pages="16,64",
        store_tokens="16384,2048,256,1",
        copy_tokens="65536,1024",
        repeat=30,
        jobs=min(8, (os.cpu_count() or 1) // 2),
    ),
    "cpu": Defaults(  # tiny: the code is tried, not the processor
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
    budget_seconds: float = BUDGET_SECONDS,
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
    support.asked(backend, selfcheck.TRIED)  # refuses what it does not know
    usual = DEFAULTS[device]
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
    if chosen.repeat < 1:
        raise AttentionError(f"--repeat must be at least 1, got {chosen.repeat}")
    if not chosen.budget_seconds > 0:  # NaN is not
        raise AttentionError(f"--budget-seconds must be above 0, got {chosen.budget_seconds}")
    if chosen.jobs < 0:
        raise AttentionError(f"--jobs must be at least 0, got {chosen.jobs}")
    _check_served(chosen)
    return chosen


def _check_served(plan: Plan) -> None:
    """Refuse what would fail in every measurement, once and before the first."""
    shape = plan.shape
    layers = [Layer(shape.heads, shape.kv_heads, shape.dim, size) for size in plan.page_tokens]
    needs = {
        op: [
            need
            for layer in layers
            for pair in plan.formats
            for need in selfcheck.needs(op, (pair.k, pair.v), layer, plan.device, torch.bfloat16)
        ]
        for op in selfcheck.TRIED
    }
    support.pick_each(plan.backend, needs)


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
