"""Tries the ops of this machine on a small cache and compares them with what they must give.

A launch that did not happen where it was said to is a failure as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

import kvq_codecs
from kvq_attention import compiling, launches, ops, support
from kvq_attention.accuracy import MAX_ERROR
from kvq_attention.errors import UnsupportedError
from kvq_attention.needs import Need
from kvq_attention.trial import Layer, Trial
from kvq_codecs import CodecError

TRIED = support.OPS
ATTEND = ("decode", "extend")


@dataclass(slots=True)
class RouteOutcome:
    """What came of one of a backend's ways to extend.

    Attributes
    ----------
    name : of the route
    error : how far it is from what it must give
    refused : why it cannot be taken
    failed : the exception that it ended with
    """

    name: str
    error: float | None = None
    refused: str | None = None
    failed: str | None = None


@dataclass(slots=True)
class Outcome:
    """What came of one format.

    Attributes
    ----------
    k, v : codec names
    layer : what was tried
    backends : op → the backend that serves it
    refused : op → why none does
    errors : op → how far it is from what it must give: rows whose bytes differ, for decode and
        extend the relative error
    failed : op → the exception that it ended with
    routes : the backend's ways to extend, if it has several: the largest error of theirs is
        extend's, and the first exception
    launched : backend → op → launches
    max_error : largest relative error of decode and extend that is allowed
    """

    k: str
    v: str
    layer: Layer
    max_error: float
    backends: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    routes: list[RouteOutcome] = field(default_factory=list)
    launched: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The codec, or k=CODEC,v=CODEC."""
        return self.k if self.k == self.v else f"k={self.k},v={self.v}"

    @property
    def problems(self) -> list[str]:
        """What is not as it should be, a line each."""
        return [line for lines in self.problems_by_op.values() for line in lines]

    @property
    def problems_by_op(self) -> dict[str, list[str]]:
        """Op → what is not as it should be, each a line that names backend, format and layer."""
        found: dict[str, list[str]] = {}

        def add(op: str, backend: str, problem: str) -> None:
            line = f"{op} of {backend}, {self.name}, {self.layer}: {problem}"
            found.setdefault(op, []).append(line)

        def judge(op: str, backend: str, error: float) -> None:
            if op not in ATTEND and error:
                add(op, backend, f"{error:.0f} rows do not hold the bytes they must")
            elif not error <= self.max_error:
                add(
                    *(op, backend),
                    f"error {error:.2g} against attention in float64, at most "
                    f"{self.max_error:.2g} is allowed",
                )

        for route in self.routes:
            backend = f"{self.backends['extend']} ({route.name})"
            if route.failed is not None:
                add("extend", backend, f"failed: {route.failed}")
            if route.error is not None:
                judge("extend", backend, route.error)
        for op in self.backends:
            if self.routes and op == "extend":
                continue
            if op in self.failed:
                add(op, self.backends[op], f"failed: {self.failed[op]}")
            if op in self.errors:
                judge(op, self.backends[op], self.errors[op])
        for backend, counted in self.launched.items():
            for op, count in counted.items():
                wanted = op in self.errors and self.backends[op] == backend
                if wanted != bool(count):
                    add(op, backend, f"it was launched {count} times")
        return found


def run(
    formats: Iterable[tuple[str, str]],
    layer: Layer,
    device: str,
    dtype: torch.dtype,
    *,
    backend: str = support.AUTO,
    each: bool = True,
    jobs: int = 0,
) -> list[Outcome]:
    """Try every format; `Outcome.problems` says what is wrong.

    Parameters
    ----------
    formats : codec names (of K, of V)
    device, dtype : where, and of what type the queries, keys and values are
    backend : "auto", a name or OP=NAME,…; what a name for all does not serve is not tried
    each : whether OP=NAME must be tried with each format, rather than with any
    jobs : processes that compile the kernels first; 0 = each when it is needed

    Raises `UnsupportedError`, before anything is tried, when nothing can be stored nor attended
    to, or when OP=NAME cannot be tried.
    """
    asked = support.asked(backend, TRIED)
    found = [Outcome(*pair, layer, MAX_ERROR[dtype]) for pair in formats]
    wanted: dict[str, list[Need]] = {op: [] for op in TRIED}
    for outcome in found:
        for op in TRIED:
            try:
                own = needs(op, (outcome.k, outcome.v), layer, device, dtype)
                wanted[op].extend(own)
                outcome.backends[op] = support.pick(asked[op], own)
            except (UnsupportedError, CodecError) as error:
                outcome.refused[op] = str(error)
    untried = [
        f"{op}={name} cannot be tried{_why(op, name, wanted[op], found)}"
        for op, name in support.named(backend).items()
        if any(op in outcome.refused for outcome in found)
        and (each or not any(op in outcome.backends for outcome in found))
    ]
    if untried:
        raise UnsupportedError("; ".join(untried))
    if not any(map(_is_tried, found)):
        if wanted["store"]:
            support.pick_each(backend, wanted)
        raise UnsupportedError(next(iter(found[0].refused.values())))
    tried = list(filter(_is_tried, found))
    runs = [((outcome.k, outcome.v), layer, outcome.backends) for outcome in tried]
    compile_ahead(runs, device, dtype, jobs)
    for outcome in tried:
        _try(outcome, device, dtype)
    return found


def compile_ahead(
    runs: Iterable[tuple[tuple[str, str], Layer, Mapping[str, str]]],
    device: str,
    dtype: torch.dtype,
    jobs: int,
) -> None:
    """Compile what `run_one` needs with these arguments, in up to `jobs` processes; 0 = none."""
    calls = [
        (pair, layer, {op: name}, device, dtype)
        for pair, layer, backends in runs
        for op, name in backends.items()
        if name != "reference"
    ]
    calls.sort(key=lambda call: "extend" not in call[2])  # which takes longest
    compiling.ahead(jobs, run_one, calls)


def run_one(
    pair: tuple[str, str],
    layer: Layer,
    backends: Mapping[str, str],
    device: str,
    dtype: torch.dtype,
) -> Outcome:
    """Try one format with the backends that are chosen already, op → backend."""
    outcome = Outcome(*pair, layer, MAX_ERROR[dtype], backends=dict(backends))
    _try(outcome, device, dtype)
    return outcome


def _is_tried(outcome: Outcome) -> bool:
    """To copy a format's pages alone would say little."""
    return bool(outcome.backends.keys() & {"store", *ATTEND})


def _why(op: str, name: str, wanted: Sequence[Need], found: Sequence[Outcome]) -> str:
    """Why an op cannot be tried, and with which formats where it can with others."""
    if wanted and not any(op in outcome.backends for outcome in found):
        try:
            support.pick(name, wanted)
        except UnsupportedError as error:
            return f": {error}"
    formats: dict[str, list[str]] = {}
    for outcome in found:
        if op in outcome.refused:
            formats.setdefault(outcome.refused[op], []).append(outcome.name)
    return ";".join(
        f" with {', '.join(names)}: {reason}" if len(names) < len(found) else f": {reason}"
        for reason, names in formats.items()
    )


def _try(outcome: Outcome, device: str, dtype: torch.dtype) -> None:
    trial = Trial.of((outcome.k, outcome.v), outcome.layer, device, dtype)
    with launches.counting() as launched:
        for op in TRIED:
            if op not in outcome.backends:
                continue
            backend = outcome.backends[op]
            if op == "extend" and ops.extend_routes(backend):
                _try_routes(outcome, trial, backend)
                continue
            attempt: Callable[[str], float] = getattr(trial, op)
            try:
                outcome.errors[op] = attempt(backend)
            except Exception as error:  # whatever broke, the other ops and formats are of interest
                outcome.failed[op] = _words(error)
    outcome.launched = launched


def _try_routes(outcome: Outcome, trial: Trial, backend: str) -> None:
    group = trial.layer.heads // trial.layer.kv_heads
    for route in ops.extend_routes(backend):
        found, rows = RouteOutcome(route.name), route.rows
        if trial.q.device.type == "cpu":  # an interpreter has no time for as many
            rows = 1
        try:
            found.error = trial.extend(backend, replace(route, rows=rows), -(-rows // group))
        except UnsupportedError as error:
            found.refused = str(error)
        except Exception as error:  # as above
            found.failed = _words(error)
        outcome.routes.append(found)
    errors = [found.error for found in outcome.routes if found.error is not None]
    failed = [f"{found.name}: {found.failed}" for found in outcome.routes if found.failed]
    if errors:
        outcome.errors["extend"] = max(errors)
    if failed:
        outcome.failed["extend"] = failed[0]


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def needs(
    op: str, pair: tuple[str, str], layer: Layer, device: str, dtype: torch.dtype
) -> list[Need]:
    """What a call of the trial needs; pages of K and of V are copied each for itself."""
    for name in pair:
        kvq_codecs.get(name).spec.check(layer.head_dim)
    asks = op in ATTEND
    group = layer.heads // layer.kv_heads if asks else 1
    features = set(layer.features) if asks else set()
    if dtype == torch.float64 and op != "copy_pages":
        features.add("float64")
    sizes = layer.head_dim, layer.head_dim, layer.page_tokens
    pairs = [(name, name) for name in pair] if op == "copy_pages" else [pair]
    queries = dtype if asks else None
    return [
        Need(op, *codecs, *sizes, device, frozenset(features), group, queries) for codecs in pairs
    ]
