"""Which backend serves a call, or a model, and why another does not.

A call needs, besides "plain", the features that it uses; a backend serves it when it can run on
the call's device and each feature has a row of SUPPORT that covers the call's codecs and sizes.
Adding a backend is adding its module to BACKENDS and its rows to SUPPORT.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module

import torch

import kvq_codecs
from kvq_attention import crossovers
from kvq_attention.choice import AUTO, MODEL_OPS, OPS, Choice, listed
from kvq_attention.claims import SUPPORT
from kvq_attention.errors import UnsupportedError
from kvq_attention.needs import Need

__all__ = [
    "AUTO",
    "BACKENDS",
    "MODEL_OPS",
    "OPS",
    "Choice",
    "asked",
    "choose",
    "named",
    "pick",
    "pick_each",
    "unavailable",
]

# Backend → module with the functions of OPS and `unavailable`. `auto` takes the first that serves,
# and those of crossovers.MEASURED only where they were measured to be the fastest.
BACKENDS = {
    "cuda": "kvq_attention.cuda.backend",
    "triton": "kvq_attention.triton.backend",
    "reference": "kvq_attention.reference",
}

# Backend and device that must be asked for by name: Triton's interpreter is there for tests.
NEVER_AUTO = {("triton", "cpu")}

NO_SUCH_OP = [""]  # the gap of a backend without any row of the op


def asked(backend: str, ops: Sequence[str] = OPS) -> dict[str, str]:
    """Op → "auto" or a backend's name, from a name for all or OP=NAME,… with auto for the rest.

    `ops` are those that the caller has a use for. Raises `UnsupportedError` for what is none of
    them, is named twice or is no backend.
    """
    given: object = backend
    names = (AUTO, *BACKENDS)
    if not isinstance(given, str) or "=" not in backend:
        if backend not in names:
            raise UnsupportedError(
                f"unknown attention backend {backend!r}; there are {', '.join(names)}, "
                "and OP=NAME,… for single operations, as in decode=triton"
            )
        return dict.fromkeys(OPS, backend)
    found: dict[str, str] = {}
    for part in backend.split(","):
        op, given_one, name = part.partition("=")
        if op in ops and not given_one:
            problem = f"{op!r} is given no backend; write OP=NAME, as in {op}=auto"
        elif op not in ops:
            problem = f"{op!r} is no operation here; there are {listed(ops)}, as in decode=triton"
        elif name not in names:
            problem = f"unknown backend {name!r} for {op}; there are {', '.join(names)}"
        elif op in found:
            problem = f"{op} is named twice; give it one backend"
        else:
            found[op] = name
            continue
        raise UnsupportedError(f"attention backend {backend!r}: {problem}")
    return {op: found.get(op, AUTO) for op in OPS}


def named(backend: str) -> dict[str, str]:
    """Op → backend, of what OP=NAME,… names; empty for a name for all."""
    by_op = asked(backend)
    whole = backend in (AUTO, *BACKENDS)
    return {} if whole else {op: name for op, name in by_op.items() if name != AUTO}


def pick(backend: str, needs: Iterable[Need], *, refusing: Mapping[str, str] | None = None) -> str:
    """The backend that serves all of these calls, which are on one device.

    `backend` is "auto" or a name; a name is obeyed or refused: `UnsupportedError` says what is
    missing and which backends would do. `refusing` has those that refuse these very calls, for
    what no row knows, and why.
    """
    if backend not in (AUTO, *BACKENDS):
        there_are = ", ".join((AUTO, *BACKENDS))
        raise UnsupportedError(f"unknown attention backend {backend!r}; there are {there_are}")
    needs, refusing = list(needs), refusing or {}
    if not needs:
        raise UnsupportedError(f"no call was given to find a backend for, asked for {backend!r}")

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


def pick_each(backend: str, needs: Mapping[str, Sequence[Need]]) -> dict[str, str]:
    """Op → the backend that serves its calls, for the ops that the caller has a use for.

    A name serves all of them or is refused, as is each op that OP=NAME,… names; the
    `UnsupportedError` tells of every op that is.
    """
    by_op = asked(backend, tuple(needs))
    if backend in BACKENDS:
        name = pick(backend, [need for own in needs.values() for need in own])
        return dict.fromkeys(needs, name)
    found, refused = {}, []
    for op, own in needs.items():
        try:
            found[op] = pick(by_op[op], own)
        except UnsupportedError as error:
            refused.append(f"{op}: {error}")
    if refused:
        raise UnsupportedError("; ".join(refused))
    return found


def choose(
    backend: str = AUTO,
    *,
    formats: Iterable[tuple[str, str]],
    head_dim: int,
    page_tokens: int,
    device: str,
    dtype: torch.dtype,
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
    dtype : of the queries and of the keys and values that are stored
    group : query heads a KV head

    Raises `UnsupportedError`, or what `kvq_codecs` raises for an unknown codec or a head_dim
    that a codec does not store.
    """
    dims = head_dim, head_dim if v_head_dim is None else v_head_dim
    formats = list(formats)
    if not formats:
        raise UnsupportedError("formats is empty; give the codecs (of K, of V) of each layer")
    for pair in formats:
        for codec, dim in zip(pair, dims, strict=True):
            kvq_codecs.get(codec).spec.check(dim)
    wanted = _known(features) | ({"float64"} if dtype == torch.float64 else set())
    storing = wanted & {row.feature for row in SUPPORT if row.op == "store"}

    def need(op: str, pair: tuple[str, str]) -> Need:
        if op == "store":
            return Need(op, *pair, *dims, page_tokens, device, storing)
        return Need(op, *pair, *dims, page_tokens, device, wanted, group, dtype)

    needs = {op: [need(op, pair) for pair in formats] for op in MODEL_OPS}
    by_op = asked(backend, MODEL_OPS)
    try:
        picked = pick_each(backend, needs)
    except UnsupportedError as error:
        hint = _hint(backend, needs) if backend in BACKENDS else ""
        raise UnsupportedError(f"{error}{hint}") from None
    chosen = Choice(picked["store"], picked["decode"], picked["extend"])
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
    """Why a backend does not serve all of these calls; None if it does.

    That it cannot run at all comes first.
    """
    found = [(need, _gaps(backend, need)) for need in needs]
    # A backend's libraries are imported only where it has one of the ops.
    devices = dict.fromkeys(need.device for need, gaps in found if gaps != NO_SUCH_OP)
    stopped = [(device, unavailable(backend, device)) for device in devices]
    reasons = [f"cannot run on {device}: {why}" for device, why in stopped if why is not None]
    lacking: dict[str, dict[str, None]] = {}  # gap → ops in order
    for need, own in found:
        for gap in own:
            lacking.setdefault(gap, {})[need.op] = None
    if lacking:
        gaps = "; ".join(listed(ops) + gap for gap, ops in lacking.items())
        reasons.append(f"lacks {gaps}")
    return f"{backend} {'; it '.join(reasons)}" if reasons else None


# Of what calls need, the rows that were searched and the gaps in them: each call of an op asks.
_found: dict[tuple[str, Need], tuple[object, list[str]]] = {}


def _gaps(backend: str, need: Need) -> list[str]:
    """What keeps a backend from serving a call, in words that follow the op's name."""
    rows, gaps = _found.get((backend, need), (None, []))
    if rows is not SUPPORT:
        gaps = _search(backend, need)
        _found[backend, need] = SUPPORT, gaps
    return gaps


def _search(backend: str, need: Need) -> list[str]:
    """The same, searched in all rows."""
    rows = [row for row in SUPPORT if (row.backend, row.op) == (backend, need.op)]
    if not rows:
        return NO_SUCH_OP
    gaps: dict[str, str] = {}  # limit → its sentence: what stops the plain form is said once
    for feature in need.all_features:
        refusals = [row.refusal(need) for row in rows if row.feature == feature]
        if None not in refusals:
            limit = " or ".join(f"for {why}" for why in dict.fromkeys(refusals)) or feature
            asked_for = f"with {need.in_words(feature)}" if feature != "plain" else ""
            words = [asked_for, limit if refusals else ""]
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
