"""The plan of a run: everything that decides what is measured, checked before anything is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

import kvq_codecs
from kvq_attention import selfcheck, support
from kvq_attention.bench.cases import (
    Case,
    Extend,
    Formats,
    Shape,
    Spot,
    parse_cases,
    parse_counts,
    parse_extends,
    parse_formats,
    parse_shapes,
)
from kvq_attention.compiling import usual_jobs
from kvq_attention.errors import AttentionError, UnsupportedError
from kvq_attention.needs import Need
from kvq_attention.trial import Layer

BASELINE = Formats("bf16", "bf16")
MIXED = Formats("q8_0", "q4_0")
DEVICES = ("cuda", "cpu")
BUDGET_SECONDS = 330.0
# What --op takes → the operations that are called.
MEASURED = {"decode": ("store", "decode", "copy_pages"), "extend": ("store", "extend")}


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run measures.

    Attributes
    ----------
    device : torch device type
    backends : "auto", a name or OP=NAME,… each; what one alone does not serve is left to the others
    shapes : heads and head_dim of the layers; the first is measured first
    formats : those of the cache; the first is `BASELINE`
    cases, page_tokens : decode, each case at each page size; the most important first
    extends : extend instead of decode, stores and copies, which are not measured beside it
    store_tokens, copy_tokens : tokens of a store, and of the pages of a `copy_pages`
    repeat : timed repetitions, of which the median counts
    budget_seconds : no measurement begins after as many
    jobs : processes that compile kernels before anything is measured; 0 = each when it is needed
    """

    device: str
    backends: tuple[str, ...]
    shapes: tuple[Shape, ...]
    formats: tuple[Formats, ...]
    cases: tuple[Case, ...]
    page_tokens: tuple[int, ...]
    store_tokens: tuple[int, ...]
    copy_tokens: tuple[int, ...]
    repeat: int
    budget_seconds: float
    jobs: int
    extends: tuple[Extend, ...] = ()

    @property
    def op(self) -> str:
        """What --op says."""
        return "extend" if self.extends else "decode"

    @property
    def ops(self) -> tuple[str, ...]:
        """The operations that are called."""
        return MEASURED[self.op]

    def told(self, op: str) -> tuple[str, ...]:
        """What an op is told in turn: "auto" or a name."""
        found = (support.asked(backend, self.ops)[op] for backend in self.backends)
        return tuple(dict.fromkeys(found))

    def ways(self, op: str, spot: Spot) -> dict[str, str]:
        """Backend → what the op is told to have it there; what none serves has none."""
        found: dict[str, str] = {}
        for told in self.told(op):
            try:
                found.setdefault(support.pick(told, self.needs(op, spot)), told)
            except UnsupportedError:
                continue
        return found

    def store_told(self, spot: Spot) -> str:
        """What `store` is told to fill a pool."""
        return next(iter(self.ways("store", spot).values()))

    def needs(self, op: str, spot: Spot) -> list[Need]:
        """What the calls of an op need."""
        shape = spot.shape
        layer = Layer(shape.heads, shape.kv_heads, shape.dim, spot.page_tokens)
        pair = (spot.formats.k, spot.formats.v)
        return selfcheck.needs(op, pair, layer, self.device, torch.bfloat16)

    @property
    def spots(self) -> Iterator[Spot]:
        """Layers, then page sizes, then formats."""
        for shape in self.shapes:
            for page_tokens in self.page_tokens:
                for formats in self.formats:
                    yield Spot(shape, page_tokens, formats)

    def not_served(self) -> list[str]:
        """What a backend is not measured at because it cannot, a line each, and why."""
        found: dict[str, None] = {}
        for op in self.ops:
            for told in self.told(op):
                for spot in self.spots:
                    reason = _refusal(told, self.needs(op, spot))
                    if reason is not None:
                        found[f"{op} of {spot.formats.name}: {reason}"] = None
        return list(found)

    @property
    def command(self) -> str:
        """A command line that measures the same."""
        listed = {
            "device": self.device,
            "shape": ",".join(shape.name for shape in self.shapes),
            "codecs": ",".join(f.name for f in self.formats),
            "op": self.op,
            "cases": ",".join(case.name for case in self.extends or self.cases),
            "pages": ",".join(map(str, self.page_tokens)),
            "store-tokens": ",".join(map(str, self.store_tokens)),
            "copy-tokens": ",".join(map(str, self.copy_tokens)),
            "repeat": self.repeat,
            "budget-seconds": f"{self.budget_seconds:g}",
        }
        said = [f"--{name} {value}" for name, value in listed.items() if value]
        said[1:1] = [f"--attention-backend {backend}" for backend in self.backends]
        return f"kvq bench attention {' '.join(said)}"


@dataclass(frozen=True, slots=True)
class Defaults:
    """What is measured where a command line does not say it."""

    shape: str
    cases: str
    extends: str
    pages: str
    store_tokens: str
    copy_tokens: str
    repeat: int
    jobs: int


DEFAULTS = {
    "cuda": Defaults(
        shape="32/8x128",
        cases="8x32k,32x8k,1x128k,128x1k,1x4k,8x4k,32x4k",
        extends="2k+8k,256+8k,1k+8k,8k+8k,2k+0,16+32k",
        pages="16,64",
        store_tokens="16384,2048,256,1",
        copy_tokens="65536,1024",
        repeat=30,
        jobs=usual_jobs(),
    ),
    "cpu": Defaults(  # tiny: the code is tried, not the processor
        shape="4/2x128",
        cases="2x64,1x200",
        extends="20+40,30+0",
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
    op: str = "decode",
    backend: str | Sequence[str] = support.AUTO,
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

    Several backends are measured beside each other, each at what it serves. Every codec that
    stores the head_dims and one pair of two codecs, unless `codecs` names some; bf16 is always
    among them. `op` "extend" is measured alone, at cases NEW+PAST. `quick` keeps the first case
    and page size and three codecs.
    Raises `AttentionError`, or what kvq_codecs raises for a codec.
    """
    if op not in MEASURED:
        raise AttentionError(f"op {op!r} must be one of {', '.join(MEASURED)}")
    if device not in DEVICES:
        raise AttentionError(f"device {device!r} must be one of {', '.join(DEVICES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(
            "a GPU that torch can use is needed to measure attention, and torch "
            f"{torch.__version__} finds none here; --device cpu runs tiny shapes, which try the "
            "command and measure no kernel"
        )
    backends = tuple(dict.fromkeys([backend] if isinstance(backend, str) else backend))
    for each in backends or ("",):
        support.asked(each, MEASURED[op])  # refuses what it does not know
    usual = DEFAULTS[device]
    layers = parse_shapes(shape or usual.shape)
    few = 1 if quick else None
    extends: tuple[Extend, ...] = ()
    if op == "extend":
        extends = parse_extends(cases) if cases else parse_extends(usual.extends)[:few]
    chosen = Plan(
        device,
        backends,
        layers,
        _formats(codecs, layers, quick),
        () if extends else parse_cases(cases) if cases else parse_cases(usual.cases)[:few],
        parse_counts(pages, "pages") if pages else parse_counts(usual.pages, "pages")[:few],
        () if extends else parse_counts(store_tokens or usual.store_tokens, "store tokens")[:few],
        () if extends else parse_counts(copy_tokens or usual.copy_tokens, "copy tokens")[:few],
        usual.repeat if repeat is None else repeat,
        budget_seconds,
        usual.jobs if jobs is None else jobs,
        extends,
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
    needs = {op: {spot: plan.needs(op, spot) for spot in plan.spots} for op in plan.ops}
    whole = {op: [need for own in spots.values() for need in own] for op, spots in needs.items()}
    if len(plan.backends) == 1:
        support.pick_each(plan.backends[0], whole)
        return
    for backend in plan.backends:
        for op, told in support.asked(backend, plan.ops).items():
            if op in needs and all(_refusal(told, own) for own in needs[op].values()):
                support.pick(told, whole[op])
    for op, spots in needs.items():
        for own in spots.values():
            reasons = [_refusal(told, own) for told in plan.told(op)]
            if None not in reasons:
                raise UnsupportedError("; ".join(dict.fromkeys(filter(None, reasons))))


def _refusal(told: str, needs: Iterable[Need]) -> str | None:
    """Why what an op is told does not serve these calls; None where it does."""
    try:
        support.pick(told, needs)
    except UnsupportedError as error:
        return str(error)
    return None


def _formats(codecs: str | None, shapes: tuple[Shape, ...], quick: bool) -> tuple[Formats, ...]:
    if codecs:
        wanted = parse_formats(codecs)
    else:
        names = _QUICK_CODECS if quick else kvq_codecs.names()
        fitting = [name for name in names if _fits(name, shapes)]
        wanted = tuple(Formats(name, name) for name in fitting)
        if not quick and {MIXED.k, MIXED.v} <= set(fitting):
            wanted += (MIXED,)
    for formats in wanted:
        for shape in shapes:
            formats.token_bytes(shape)  # refuses a head_dim that a codec does not store
    return tuple(dict.fromkeys((BASELINE, *wanted)))


def _fits(codec: str, shapes: tuple[Shape, ...]) -> bool:
    divisor = kvq_codecs.get(codec).spec.divisor
    return all(shape.dim % divisor == 0 for shape in shapes)
