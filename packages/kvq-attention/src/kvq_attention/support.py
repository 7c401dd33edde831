"""What works with what. A row is one claim, and names the test that proves it.

A call needs, besides "plain", the features that it uses; a backend serves it when each of them
has a row that covers the call's codecs, head_dims and device. Adding a backend is adding its
module to BACKENDS and its rows to SUPPORT.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import kvq_codecs
from kvq_attention.errors import UnsupportedError

OPS = ("store", "decode", "extend")
AUTO = "auto"

# Backend → module with the functions of OPS; `auto` takes the first that serves a call.
BACKENDS = {"reference": "kvq_attention.reference"}


@dataclass(frozen=True, slots=True)
class Need:
    """What one call needs.

    Attributes
    ----------
    op : store, decode or extend
    k, v : codec names
    k_dim, v_dim : values a row (head_dim)
    device : torch device type
    features : "plain" and the optional parts in use
    """

    op: str
    k: str
    v: str
    k_dim: int
    v_dim: int
    device: str
    features: frozenset[str] = frozenset()

    @property
    def all_features(self) -> list[str]:
        """The features given and those that the codecs and sizes imply, in order."""
        implied = {"plain"}
        if self.k != self.v:
            implied.add("mixed_codecs")
        if self.k_dim != self.v_dim:
            implied.add("value_dim")
        return sorted(implied | self.features)


@dataclass(frozen=True, slots=True)
class Row:
    """One claim: this op of this backend has this feature.

    Attributes
    ----------
    op, backend, feature : what is claimed
    proof : name of the test, in this package's tests, that proves it
    codecs : codecs it holds for; None = every registered one, at each head_dim the codec allows
    head_dims : head_dims it holds for; None = any
    devices : torch device types it holds for; None = any whose tensors hold values
    """

    op: str
    backend: str
    feature: str
    proof: str
    codecs: tuple[str, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    devices: tuple[str, ...] | None = None

    @property
    def id(self) -> str:
        """What the proving test's marker `proves` names."""
        parts = [self.backend, self.op, self.feature, *(self.codecs or ())]
        return ".".join(parts)

    def refusal(self, need: Need) -> str | None:
        """Why the row does not cover a call; None if it does."""
        if need.device == "meta":
            return "device meta (its tensors hold no values)"
        for codec in (need.k, need.v):
            if self.codecs is not None and codec not in self.codecs:
                return f"codec {codec} (has {', '.join(self.codecs)})"
        for dim in (need.k_dim, need.v_dim):
            if self.head_dims is not None and dim not in self.head_dims:
                return f"head_dim {dim} (has {', '.join(map(str, self.head_dims))})"
        if self.devices is not None and need.device not in self.devices:
            return f"device {need.device} (has {', '.join(self.devices)})"
        return None


SUPPORT: tuple[Row, ...] = (
    Row("store", "reference", "plain", "test_store_writes_the_bytes_of_every_codec"),
    Row("store", "reference", "mixed_codecs", "test_store_takes_two_codecs"),
    Row("store", "reference", "value_dim", "test_store_takes_two_head_dims"),
    Row("decode", "reference", "plain", "test_decode_attends_over_every_codec"),
    Row("decode", "reference", "mixed_codecs", "test_decode_reads_two_codecs"),
    Row("decode", "reference", "value_dim", "test_decode_reads_two_head_dims"),
    Row("decode", "reference", "gqa", "test_decode_shares_kv_heads"),
    Row("decode", "reference", "window", "test_decode_slides_a_window"),
    Row("decode", "reference", "softcap", "test_decode_caps_scores"),
    Row("decode", "reference", "sinks", "test_decode_joins_sinks"),
    Row("extend", "reference", "plain", "test_extend_attends_over_every_codec"),
    Row("extend", "reference", "mixed_codecs", "test_extend_reads_two_codecs"),
    Row("extend", "reference", "value_dim", "test_extend_reads_two_head_dims"),
    Row("extend", "reference", "gqa", "test_extend_shares_kv_heads"),
    Row("extend", "reference", "window", "test_extend_slides_a_window"),
    Row("extend", "reference", "softcap", "test_extend_caps_scores"),
    Row("extend", "reference", "sinks", "test_extend_joins_sinks"),
)


def pick(backend: str, needs: Iterable[Need]) -> str:
    """The backend that serves all of these calls.

    `backend` is "auto" or a name; a name is obeyed or refused: `UnsupportedError` says what is
    missing and which backends would do.
    """
    if backend not in (AUTO, *BACKENDS):
        raise UnsupportedError(
            f"unknown attention backend {backend!r}; there are {', '.join((AUTO, *BACKENDS))}"
        )
    needs = list(needs)
    wanted = BACKENDS if backend == AUTO else (backend,)
    missing = {name: _missing(name, needs) for name in wanted}
    for name, reasons in missing.items():
        if not reasons:
            return name
    able = [name for name in BACKENDS if not _missing(name, needs)]
    said = "; ".join(f"{name} lacks {', '.join(reasons)}" for name, reasons in missing.items())
    raise UnsupportedError(f"{said}; backends that can: {', '.join(able) or 'none'}")


def choose(
    backend: str = AUTO,
    *,
    k: str,
    v: str,
    head_dim: int,
    device: str,
    v_head_dim: int | None = None,
    features: Iterable[str] = (),
) -> str:
    """The backend whose store, decode and extend serve a model, by the names of its codecs.

    Raises `UnsupportedError`, or what `kvq_codecs` raises for an unknown codec or a head_dim
    that a codec does not store.
    """
    dims = head_dim, head_dim if v_head_dim is None else v_head_dim
    for codec, dim in zip((k, v), dims, strict=True):
        kvq_codecs.get(codec).spec.check(dim)
    if isinstance(features, str) or not isinstance(features, Iterable):
        raise UnsupportedError(f"features must be a collection of names, got {features!r}")
    wanted = frozenset(features)
    known = {row.feature for row in SUPPORT}
    if not wanted <= known:
        raise UnsupportedError(
            f"unknown features {sorted(wanted - known)}; there are {sorted(known)}"
        )
    storing = wanted & {row.feature for row in SUPPORT if row.op == "store"}
    return pick(
        backend,
        [Need(op, k, v, *dims, device, storing if op == "store" else wanted) for op in OPS],
    )


def markdown() -> str:
    """The table as a reference page."""
    lines = [
        "# What works with what",
        "",
        "A call needs `plain` and every feature it uses; each row is proven by the test it names.",
        "",
        "| backend | op | feature | codecs | head_dim | devices | proven by |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in SUPPORT:
        dims = None if row.head_dims is None else tuple(map(str, row.head_dims))
        cells = [
            *(row.backend, row.op, row.feature),
            *(_cell(row.codecs, "every"), _cell(dims, "as the codec allows")),
            *(_cell(row.devices, "any"), f"`{row.proof}`"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _missing(backend: str, needs: Iterable[Need]) -> list[str]:
    reasons = []
    for need in needs:
        for feature in need.all_features:
            rows = [
                row
                for row in SUPPORT
                if (row.backend, row.op, row.feature) == (backend, need.op, feature)
            ]
            refusals = [row.refusal(need) for row in rows]
            if not rows:
                reasons.append(f"{need.op} with {feature}")
            elif None not in refusals:
                why = " or ".join(dict.fromkeys(str(reason) for reason in refusals))
                reasons.append(f"{need.op} with {feature} for {why}")
    return reasons


def _cell(values: tuple[str, ...] | None, every: str) -> str:
    return every if values is None else ", ".join(values)
