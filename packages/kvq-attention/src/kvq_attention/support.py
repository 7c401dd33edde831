"""Which backend serves a call, or a model, and why another does not.

A call needs, besides "plain", the features that it uses; a backend serves it when it can run on
the call's device and each feature has a row of SUPPORT that covers the call's codecs and sizes.
Adding a backend is adding its module to BACKENDS and its rows to SUPPORT.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module

import kvq_codecs
from kvq_attention import crossovers
from kvq_attention.claims import SUPPORT
from kvq_attention.errors import UnsupportedError
from kvq_attention.needs import Need

MODEL_OPS = ("store", "decode", "extend")
OPS = (*MODEL_OPS, "copy_pages")
AUTO = "auto"

# Backend → module with the functions of OPS and `unavailable`. `auto` takes the first that serves,
# and those of crossovers.MEASURED only where they were measured to be the fastest.
BACKENDS = {
    "cuda": "kvq_attention.cuda.backend",
    "triton": "kvq_attention.triton.backend",
    "reference": "kvq_attention.reference",
}

# Backend and device that must be asked for by name: Triton's interpreter is there for tests.
NEVER_AUTO = {("triton", "cpu")}


@dataclass(frozen=True, slots=True)
class Choice:
    """The backends that serve a model, op by op.

    Attributes
    ----------
    store, decode, extend : the backend of each op
    passed_over : what kept `auto` from a backend that it would have preferred, in words
    measured : ops whose backend `auto` took by measurement
    """

    store: str
    decode: str
    extend: str
    passed_over: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()

    def by_op(self) -> dict[str, str]:
        """Op → backend."""
        return {op: getattr(self, op) for op in MODEL_OPS}

    def told(self, op: str) -> str:
        """What to tell `ops`: the op's backend, or "auto" where a single call may go elsewhere."""
        backend: str = getattr(self, op)
        return AUTO if op in self.measured else backend

    def __str__(self) -> str:
        """In words: `reference`, or `triton for store and decode, reference for extend`."""
        ops: dict[str, list[str]] = {}
        for op, backend in self.by_op().items():
            ops.setdefault(backend, []).append(op)
        if len(ops) == 1:
            return self.store
        return ", ".join(f"{backend} for {_listed(served)}" for backend, served in ops.items())


def asked(backend: str) -> dict[str, str]:
    """Op → "auto" or a backend's name, from a name for all or OP=NAME,… with auto for the rest.

    Raises `UnsupportedError` for what is no op or no backend.
    """
    given: object = backend
    if not isinstance(given, str) or "=" not in backend:
        return dict.fromkeys(OPS, _checked(backend))
    by_op = dict.fromkeys(OPS, AUTO)
    for part in backend.split(","):
        op, _, name = part.partition("=")
        if op not in OPS:
            raise UnsupportedError(
                f"attention backend {backend!r}: {op!r} is no operation; there are {_listed(OPS)}, "
                "as in decode=triton"
            )
        by_op[op] = _checked(name)
    return by_op


def pick(backend: str, needs: Iterable[Need], *, refusing: Mapping[str, str] | None = None) -> str:
    """The backend that serves all of these calls, which are on one device.

    `backend` is "auto" or a name; a name is obeyed or refused: `UnsupportedError` says what is
    missing and which backends would do. `refusing` has those that refuse these very calls, for
    what no row knows, and why.
    """
    _checked(backend)
    needs, refusing = list(needs), refusing or {}

    def refusal(name: str) -> str | None:
        if name in refusing:
            return f"{name} cannot {needs[0].op} this: {refusing[name]}"
        return _refusal(name, needs)

    refused = []
    for name in _candidates(backend, needs):
        reason = refusal(name)
        if reason is None:
            return name
        refused.append(reason)
    able = [name for name in BACKENDS if refusal(name) is None]
    raise UnsupportedError(f"{'; '.join(refused)}; backends that can: {', '.join(able) or 'none'}")


def choose(
    backend: str = AUTO,
    *,
    formats: Iterable[tuple[str, str]],
    head_dim: int,
    page_tokens: int,
    device: str,
    v_head_dim: int | None = None,
    features: Iterable[str] = (),
    group: int = 1,
) -> Choice:
    """The backends whose store, decode and extend serve a model.

    `auto` chooses for each op; a name serves all three or is refused; OP=NAME,… names some.

    Parameters
    ----------
    formats : codec names (of K, of V), each pair that a layer has
    head_dim, v_head_dim : values a row of K and of V
    page_tokens : tokens a page
    device : torch device type
    group : query heads a KV head

    Raises `UnsupportedError`, or what `kvq_codecs` raises for an unknown codec or a head_dim
    that a codec does not store.
    """
    dims = head_dim, head_dim if v_head_dim is None else v_head_dim
    formats = list(formats)
    for pair in formats:
        for codec, dim in zip(pair, dims, strict=True):
            kvq_codecs.get(codec).spec.check(dim)
    wanted = _known(features)
    storing = wanted & {row.feature for row in SUPPORT if row.op == "store"}
    needs = {
        op: [
            Need(op, *pair, *dims, page_tokens, device, storing if op == "store" else wanted, group)
            for pair in formats
        ]
        for op in MODEL_OPS
    }
    by_op = asked(backend)
    if backend in BACKENDS:
        try:
            pick(backend, [need for op in MODEL_OPS for need in needs[op]])
        except UnsupportedError as error:
            raise UnsupportedError(f"{error}{_hint(backend, needs)}") from None
    store, decode, extend = (pick(by_op[op], needs[op]) for op in MODEL_OPS)
    chosen = Choice(store, decode, extend)
    return replace(
        chosen,
        passed_over=_passed_over(by_op, needs, chosen.by_op()),
        measured=tuple(
            op
            for op, name in chosen.by_op().items()
            if by_op[op] == AUTO and name in crossovers.MEASURED
        ),
    )


def unavailable(backend: str, device: str) -> str | None:
    """Why a backend cannot run on a torch device type, whatever is asked of it; None if it can."""
    try:
        module = import_module(BACKENDS[backend])
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith(__package__):
            raise
        return f"{error.name} is not installed"
    reason: str | None = module.unavailable(device)
    return reason


def _candidates(backend: str, needs: Iterable[Need]) -> list[str]:
    """The backends that may be picked, the preferred one first."""
    if backend != AUTO:
        return [backend]
    devices = {need.device for need in needs}
    return [
        name
        for name in BACKENDS
        if not any((name, device) in NEVER_AUTO for device in devices)
        and (name not in crossovers.MEASURED or crossovers.fastest(name, needs))
    ]


def _passed_over(
    by_op: Mapping[str, str], needs: Mapping[str, list[Need]], chosen: Mapping[str, str]
) -> tuple[str, ...]:
    """What kept `auto`, where it was asked for, from backends that it prefers to the chosen."""
    wanted: dict[str, list[Need]] = {}
    for op in (op for op in MODEL_OPS if by_op[op] == AUTO):
        preferred = _candidates(AUTO, needs[op])
        for name in preferred[: preferred.index(chosen[op])]:
            wanted.setdefault(name, []).extend(needs[op])
    return tuple(filter(None, (_refusal(name, wanted[name]) for name in wanted)))


def _checked(backend: str) -> str:
    if backend not in (AUTO, *BACKENDS):
        raise UnsupportedError(
            f"unknown attention backend {backend!r}; there are {', '.join((AUTO, *BACKENDS))}"
        )
    return backend


def _known(features: Iterable[str]) -> frozenset[str]:
    if isinstance(features, str) or not isinstance(features, Iterable):
        raise UnsupportedError(f"features must be a collection of names, got {features!r}")
    wanted, known = frozenset(features), {row.feature for row in SUPPORT}
    if not wanted <= known:
        raise UnsupportedError(
            f"unknown features {sorted(wanted - known)}; there are {sorted(known)}"
        )
    return wanted


def _refusal(backend: str, needs: Iterable[Need]) -> str | None:
    """Why a backend does not serve all of these calls; None if it does."""
    found = [(need, _gaps(backend, need)) for need in needs]
    # A backend's libraries are imported only where its rows would serve a call.
    for device in dict.fromkeys(need.device for need, gaps in found if not gaps):
        reason = unavailable(backend, device)
        if reason is not None:
            return f"{backend} cannot run on {device}: {reason}"
    lacking: dict[str, dict[str, None]] = {}  # gap → ops in order
    for need, gaps in found:
        for gap in gaps:
            lacking.setdefault(gap, {})[need.op] = None
    if not lacking:
        return None
    return f"{backend} lacks {'; '.join(_listed(ops) + gap for gap, ops in lacking.items())}"


def _gaps(backend: str, need: Need) -> list[str]:
    """What keeps a backend from serving a call, in words that follow the op's name."""
    rows = [row for row in SUPPORT if (row.backend, row.op) == (backend, need.op)]
    if not rows:
        return [""]
    gaps: dict[str, str] = {}  # limit → its sentence: what stops the plain form is said once
    for feature in need.all_features:
        refusals = [row.refusal(need) for row in rows if row.feature == feature]
        if None not in refusals:
            limit = " or ".join(f"for {why}" for why in dict.fromkeys(refusals)) or feature
            words = [f"with {feature}" if feature != "plain" else "", limit if refusals else ""]
            gaps.setdefault(limit, " ".join(["", *filter(None, words)]))
    return list(gaps.values())


def _hint(backend: str, needs: Mapping[str, list[Need]]) -> str:
    """How a backend that was refused for all ops is had for those that it serves."""
    able = [op for op in MODEL_OPS if _refusal(backend, needs[op]) is None]
    try:
        store, decode, extend = (pick(AUTO, needs[op]) for op in MODEL_OPS)
    except UnsupportedError:
        return ""
    auto = Choice(store, decode, extend)
    if backend in auto.by_op().values():
        return f"; auto takes {auto}"
    return f"; {','.join(f'{op}={backend}' for op in able)} takes what it has" if able else ""


def _listed(words: Iterable[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last
