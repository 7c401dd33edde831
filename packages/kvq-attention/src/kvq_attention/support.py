"""What works with what. A row is one claim, and names the test that proves it.

A call needs, besides "plain", the features that it uses; a backend serves it when it can run on
the call's device and each feature has a row that covers the call's codecs and sizes. Adding a
backend is adding its module to BACKENDS and its rows to SUPPORT.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module

import kvq_codecs
from kvq_attention.errors import UnsupportedError
from kvq_attention.needs import Need, Row
from kvq_codecs.registry import BUILT_IN

MODEL_OPS = ("store", "decode", "extend")
OPS = (*MODEL_OPS, "copy_pages")
AUTO = "auto"

# Backend → module with the functions of OPS and `unavailable`; `auto` takes the first that serves.
BACKENDS = {"triton": "kvq_attention.triton.backend", "reference": "kvq_attention.reference"}

# Backend and device that must be asked for by name: Triton's interpreter is there for tests.
NEVER_AUTO = {("triton", "cpu")}

# Codecs that Triton has no kernels for, and why.
WITHOUT_TRITON: dict[str, str] = {}
TRITON_CODECS = tuple(name for name in BUILT_IN if name not in WITHOUT_TRITON)
TRITON_HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
TRITON_PAGE_TOKENS = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Choice:
    """The backends that serve a model, op by op.

    Attributes
    ----------
    store, decode, extend : the backend of each op
    passed_over : what kept `auto` from a backend that it would have preferred, in words
    """

    store: str
    decode: str
    extend: str
    passed_over: tuple[str, ...] = ()

    def by_op(self) -> dict[str, str]:
        """Op → backend."""
        return {op: getattr(self, op) for op in MODEL_OPS}

    def __str__(self) -> str:
        """In words: `reference`, or `triton for store and decode, reference for extend`."""
        ops: dict[str, list[str]] = {}
        for op, backend in self.by_op().items():
            ops.setdefault(backend, []).append(op)
        if len(ops) == 1:
            return self.store
        return ", ".join(f"{backend} for {_listed(served)}" for backend, served in ops.items())


def _triton(op: str, feature: str, proof: str) -> Row:
    return Row(
        *(op, "triton", feature, proof),
        codecs=TRITON_CODECS,
        head_dims=TRITON_HEAD_DIMS,
        page_tokens=TRITON_PAGE_TOKENS,
        devices=("cuda", "cpu"),
    )


SUPPORT: tuple[Row, ...] = (
    Row("store", "reference", "plain", "test_store_writes_the_bytes_of_every_codec"),
    Row("store", "reference", "mixed_codecs", "test_store_takes_two_codecs"),
    Row("store", "reference", "value_dim", "test_store_takes_two_head_dims"),
    Row("store", "reference", "float64", "test_p051_store_takes_every_float_dtype"),
    Row("decode", "reference", "plain", "test_decode_attends_over_every_codec"),
    Row("decode", "reference", "mixed_codecs", "test_decode_reads_two_codecs"),
    Row("decode", "reference", "value_dim", "test_decode_reads_two_head_dims"),
    Row("decode", "reference", "gqa", "test_decode_shares_kv_heads"),
    Row("decode", "reference", "window", "test_decode_slides_a_window"),
    Row("decode", "reference", "softcap", "test_decode_caps_scores"),
    Row("decode", "reference", "sinks", "test_decode_joins_sinks"),
    Row("decode", "reference", "float64", "test_p051_decode_takes_every_query_dtype"),
    Row("extend", "reference", "plain", "test_extend_attends_over_every_codec"),
    Row("extend", "reference", "mixed_codecs", "test_extend_reads_two_codecs"),
    Row("extend", "reference", "value_dim", "test_extend_reads_two_head_dims"),
    Row("extend", "reference", "gqa", "test_extend_shares_kv_heads"),
    Row("extend", "reference", "window", "test_extend_slides_a_window"),
    Row("extend", "reference", "softcap", "test_extend_caps_scores"),
    Row("extend", "reference", "sinks", "test_extend_joins_sinks"),
    Row("extend", "reference", "float64", "test_p051_extend_takes_every_dtype"),
    Row("copy_pages", "reference", "plain", "test_copy_pages_copies_every_plane"),
    _triton("store", "plain", "test_triton_stores_the_bytes_of_every_codec"),
    _triton("store", "mixed_codecs", "test_triton_stores_two_codecs"),
    _triton("store", "value_dim", "test_triton_stores_two_head_dims"),
    _triton("decode", "plain", "test_triton_decodes_every_codec"),
    _triton("decode", "mixed_codecs", "test_triton_decodes_two_codecs"),
    _triton("decode", "value_dim", "test_triton_decodes_two_head_dims"),
    _triton("decode", "gqa", "test_triton_decodes_shared_kv_heads"),
    _triton("decode", "window", "test_triton_decodes_a_window"),
    _triton("decode", "softcap", "test_triton_decodes_capped_scores"),
    _triton("decode", "sinks", "test_triton_decodes_sinks"),
    Row("copy_pages", "triton", "plain", "test_triton_copies_pages", devices=("cuda", "cpu")),
)


def pick(backend: str, needs: Iterable[Need]) -> str:
    """The backend that serves all of these calls, which are on one device.

    `backend` is "auto" or a name; a name is obeyed or refused: `UnsupportedError` says what is
    missing and which backends would do.
    """
    if backend not in (AUTO, *BACKENDS):
        raise UnsupportedError(
            f"unknown attention backend {backend!r}; there are {', '.join((AUTO, *BACKENDS))}"
        )
    needs = list(needs)
    refused = []
    for name in _candidates(backend, needs):
        refusal = _refusal(name, needs)
        if refusal is None:
            return name
        refused.append(refusal)
    able = [name for name in BACKENDS if _refusal(name, needs) is None]
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
) -> Choice:
    """The backends whose store, decode and extend serve a model.

    `auto` chooses for each op; a name serves all three or is refused.

    Parameters
    ----------
    formats : codec names (of K, of V), each pair that a layer has
    head_dim, v_head_dim : values a row of K and of V
    page_tokens : tokens a page
    device : torch device type

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
            Need(op, *pair, *dims, page_tokens, device, storing if op == "store" else wanted)
            for pair in formats
        ]
        for op in MODEL_OPS
    }
    every = [need for op in MODEL_OPS for need in needs[op]]
    if backend == AUTO:
        chosen = _auto(needs)
        preferred = _candidates(AUTO, every)
        better = preferred[: max(map(preferred.index, chosen.by_op().values()))]
        refusals = [_refusal(name, every) for name in better]
        return replace(chosen, passed_over=tuple(filter(None, refusals)))
    try:
        pick(backend, every)
    except UnsupportedError as error:
        raise UnsupportedError(f"{error}{_hint(backend, needs)}") from None
    return Choice(backend, backend, backend)


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


def markdown() -> str:
    """The table as a reference page."""
    lines = [
        "# What works with what",
        "",
        "A call needs `plain` and every feature it uses; each row is proven by the test it names.",
        "",
        "| backend | op | feature | codecs | head_dim | page tokens | devices | proven by |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in SUPPORT:
        cells = [
            *(row.backend, row.op, row.feature),
            *(_cell(row.codecs, "every"), _cell(row.head_dims, "as the codec allows")),
            *(_cell(row.page_tokens, "any"), _cell(row.devices, "any"), f"`{row.proof}`"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _candidates(backend: str, needs: Iterable[Need]) -> list[str]:
    """The backends that may be picked, the preferred one first."""
    if backend != AUTO:
        return [backend]
    devices = {need.device for need in needs}
    return [name for name in BACKENDS if not any((name, d) in NEVER_AUTO for d in devices)]


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


def _auto(needs: Mapping[str, list[Need]]) -> Choice:
    store, decode, extend = (pick(AUTO, needs[op]) for op in MODEL_OPS)
    return Choice(store, decode, extend)


def _hint(backend: str, needs: Mapping[str, list[Need]]) -> str:
    """That `auto` would use a backend for some ops, which was refused for all of them."""
    try:
        auto = _auto(needs)
    except UnsupportedError:
        return ""
    return f"; auto takes {auto}" if backend in auto.by_op().values() else ""


def _listed(words: Iterable[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def _cell(values: tuple[str, ...] | tuple[int, ...] | None, every: str) -> str:
    return every if values is None else ", ".join(map(str, values))
