"""The operations: every tensor verified, a backend picked from SUPPORT, the backend called.

Sizes: T tokens of the step, R requests, Hq query heads, Hkv key/value heads, D and Dv values a
key and a value row, P pages, N tokens a page, M pages to copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Protocol, cast

import torch

from kvq_attention import launches, support
from kvq_attention.batch import Batch
from kvq_attention.errors import AttentionError, BatchError, TensorError, UnsupportedError
from kvq_attention.needs import Need
from kvq_attention.routes import Route
from kvq_attention.scoring import Scoring
from kvq_attention.verify import FLOATS, Sizes
from kvq_codecs import Encoded

SCRATCH_BYTES = 128 << 20


class Backend(Protocol):
    """What a backend's module offers; arguments are verified, values on a device are not."""

    def unavailable(self, device: str) -> str | None:
        """Why it cannot run on a torch device type; None if it can."""

    def store(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: Encoded,
        v_cache: Encoded,
        slot_mapping: torch.Tensor,
    ) -> None: ...

    def decode(
        self,
        q: torch.Tensor,
        k_cache: Encoded,
        v_cache: Encoded,
        batch: Batch,
        tier: str,
        scoring: Scoring,
    ) -> torch.Tensor: ...

    # `refusal` beside it, if the module has one, takes the same arguments: why this very call
    # cannot be decoded, for what no row of SUPPORT knows (strides, say); None if it can.

    def extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: Encoded,
        v_cache: Encoded,
        batch: Batch,
        tier: str,
        scoring: Scoring,
        scratch_bytes: int,
    ) -> torch.Tensor: ...

    # `extend_routes`, if the module has it, gives all its ways to extend; its `extend` then takes
    # one of them as `route`. `extend_reads_host` beside it says which requests need `Batch.host`.

    def copy_pages(
        self, caches: Sequence[Encoded], source_pages: torch.Tensor, target_pages: torch.Tensor
    ) -> None: ...


def store(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: Encoded,
    v_cache: Encoded,
    slot_mapping: torch.Tensor,
    *,
    backend: str = support.AUTO,
) -> None:
    """Encode the step's K and V rows and write them into their slots.

    Parameters
    ----------
    k, v : [T, Hkv, D] and [T, Hkv, Dv], any float dtype, each with strides of its own
    k_cache, v_cache : planes [P, Hkv, N, items], written in place
    slot_mapping : int64 [T], page · N + offset, each slot at most once; −1 = not stored

    Raises `AttentionError` (of the kind that fits), or what a codec raises, before anything is
    written.
    """
    sizes = _caches(k_cache, v_cache)
    sizes.tensor("k", k, ("T", "Hkv", "D"), FLOATS)
    sizes.tensor("v", v, ("T", "Hkv", "Dv"), FLOATS)
    sizes.tensor("slot_mapping", slot_mapping, ("T",), (torch.int64,))
    need = _need("store", sizes, k_cache, v_cache, _wide(k, v), None)
    _module(support.pick(backend, [need])).store(k, v, k_cache, v_cache, slot_mapping)


def decode(
    q: torch.Tensor,
    k_cache: Encoded,
    v_cache: Encoded,
    batch: Batch,
    tier: str,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    backend: str = support.AUTO,
) -> torch.Tensor:
    """Attend over the cache alone: the step's own K and V are stored already and read packed.

    Parameters
    ----------
    q : [T, Hq, D], any float dtype; a request's queries are its last tokens, causal among
        themselves; query head h reads KV head h // (Hq / Hkv)
    k_cache, v_cache : planes [P, Hkv, N, items]
    batch, tier : the requests, and which of the batch's tables addresses these caches
    scale, window, softcap, sinks : see `Scoring`
    backend : a name is obeyed or refused, by its rows or by itself; "auto" goes on to another where
        the preferred one refuses this very call, and `launches.passed_over` counts that

    Returns [T, Hq, Dv] in q's dtype; rows that see nothing give 0.
    """
    sizes = _caches(k_cache, v_cache)
    scoring = _attention(sizes, q, batch, tier, Scoring(scale, window, softcap, sinks))
    need = _need("decode", sizes, k_cache, v_cache, scoring.features | _wide(q), q.dtype)
    name = support.pick(backend, [need])
    refusal = getattr(_module(name), "refusal", None) if backend == support.AUTO else None
    reason = refusal and refusal(q, k_cache, v_cache, batch, tier, scoring)
    if reason is not None:
        other = support.pick(backend, [need], refusing={name: reason})
        launches.pass_over(name, "decode", reason)
        name = other
    return _module(name).decode(q, k_cache, v_cache, batch, tier, scoring)


def extend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: Encoded,
    v_cache: Encoded,
    batch: Batch,
    tier: str,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scratch_bytes: int = SCRATCH_BYTES,
    backend: str = support.AUTO,
    route: Route | None = None,
) -> torch.Tensor:
    """Attend over the step's K and V as they came and over earlier tokens packed.

    The step's own slots are not read: the caller stores k and v afterwards.

    Parameters
    ----------
    k, v : [T, Hkv, D] and [T, Hkv, Dv], the step's rows, any float dtype and strides
    scratch_bytes : that decoded tokens may take at most while they are read, on backends that
        decode for many queries at once; 0 = none
    route : like one of `extend_routes`, to be taken by requests of so many rows, or refused: for
        checks and measurements; None = what the backend holds to be the fastest
    others : as for `decode`

    Returns [T, Hq, Dv] in q's dtype; rows that see nothing give 0.
    """
    sizes = _caches(k_cache, v_cache)
    sizes.tensor("k", k, ("T", "Hkv", "D"), FLOATS)
    sizes.tensor("v", v, ("T", "Hkv", "Dv"), FLOATS)
    scoring = _attention(sizes, q, batch, tier, Scoring(scale, window, softcap, sinks))
    if type(scratch_bytes) is not int or scratch_bytes < 0:
        raise AttentionError(f"scratch_bytes must be an int of at least 0, got {scratch_bytes!r}")
    features = scoring.features | _wide(q, k, v)
    name = support.pick(backend, [_need("extend", sizes, k_cache, v_cache, features, q.dtype)])
    given = q, k, v, k_cache, v_cache, batch, tier, scoring, scratch_bytes
    if route is None:
        return _module(name).extend(*given)
    names = [each.name for each in extend_routes(name)]
    if route.name not in names:
        raise UnsupportedError(f"{name} has no route {route.name!r}; it has {names or 'one way'}")
    by_route: Callable[..., torch.Tensor] = _module(name).extend
    return by_route(*given, route=route)


def extend_routes(backend: str) -> tuple[Route, ...]:
    """The ways in which a backend extends, each with the rows from which on; none if it has one."""
    found = getattr(_module(backend), "extend_routes", None)
    return found() if found else ()


def extend_reads_host(backend: str, *, queries: int, past: int, heads: int, dim: int) -> bool:
    """Whether a backend may extend a request by other kernels where it has `Batch.host`.

    A step of which that is so is not replayed from a graph, which has none, without a loss.

    Parameters
    ----------
    queries, past : tokens of the request in this step, and before it
    heads, dim : query heads, values a row
    """
    found = getattr(_module(backend), "extend_reads_host", None)
    return bool(found and found(queries, past, heads, dim))


def copy_pages(
    caches: Sequence[Encoded],
    source_pages: torch.Tensor,
    target_pages: torch.Tensor,
    *,
    backend: str = support.AUTO,
) -> None:
    """Copy whole pages, byte for byte, in every plane of every cache.

    Parameters
    ----------
    caches : planes [P, Hkv, N, items] each, written in place: say K and V of every layer; all
        have the same P, heads and rows may differ
    source_pages, target_pages : int64 [M], page ids; −1 in either = skipped; each target at most
        once, and no target is a source

    Raises `AttentionError` (of the kind that fits) before anything is written.
    """
    given: object = caches
    if not isinstance(given, Sequence) or not given:
        raise TensorError(
            "caches must be a sequence of at least one kvq_codecs.Encoded, got "
            + (type(given).__name__ if given else repr(given))
        )
    sizes = Sizes()
    for index, cache in enumerate(caches):
        own = f"Hkv{index}", f"N{index}", f"D{index}"
        sizes.cache(f"caches[{index}]", cache, ("P", *own))
    sizes.tensor("source_pages", source_pages, ("M",), (torch.int64,))
    sizes.tensor("target_pages", target_pages, ("M",), (torch.int64,))
    device = sizes.one_device().type
    needs = dict.fromkeys(_copying(cache, device) for cache in caches)
    chosen = _module(support.pick(backend, needs))
    chosen.copy_pages(caches, source_pages, target_pages)


def _caches(k_cache: Encoded, v_cache: Encoded) -> Sizes:
    sizes = Sizes()
    sizes.cache("k_cache", k_cache, ("P", "Hkv", "N", "D"))
    sizes.cache("v_cache", v_cache, ("P", "Hkv", "N", "Dv"))
    return sizes


def _attention(sizes: Sizes, q: torch.Tensor, batch: Batch, tier: str, scoring: Scoring) -> Scoring:
    sizes.tensor("q", q, ("T", "Hq", "D"), FLOATS)
    if sizes["Hq"] % sizes["Hkv"]:
        raise TensorError(
            f"q has {sizes['Hq']} heads, which is not a multiple of the caches' {sizes['Hkv']}"
        )
    if scoring.sinks is not None:
        sizes.tensor("sinks", scoring.sinks, ("Hq",), FLOATS)
    if not isinstance(batch, Batch):
        raise BatchError(f"batch must be a Batch, got {type(batch).__name__}")
    sizes.shape("slot_mapping", tuple(batch.table(tier).slot_mapping.shape), ("T",))
    if batch.page_tokens != sizes["N"]:
        raise TensorError(
            f"the batch counts {batch.page_tokens} tokens a page, the caches have {sizes['N']}"
        )
    sizes.place("batch", batch.seq_lens)
    return scoring


def _need(
    op: str,
    sizes: Sizes,
    k_cache: Encoded,
    v_cache: Encoded,
    features: frozenset[str],
    query_dtype: torch.dtype | None,
) -> Need:
    device = sizes.one_device().type
    group = 1 if op == "store" else sizes["Hq"] // sizes["Hkv"]
    if group != 1:
        features |= {"gqa"}
    specs = k_cache.spec.name, v_cache.spec.name
    dims = sizes["D"], sizes["Dv"]
    return Need(op, *specs, *dims, sizes["N"], device, features, group, query_dtype)


def _copying(cache: Encoded, device: str) -> Need:
    name, page_tokens = cache.spec.name, cache.lead[2]
    return Need("copy_pages", name, name, cache.dim, cache.dim, page_tokens, device)


def _wide(*tensors: torch.Tensor) -> frozenset[str]:
    """The feature that float64 tensors need."""
    return frozenset({"float64"} if any(t.dtype == torch.float64 for t in tensors) else ())


def _module(backend: str) -> Backend:
    return cast(Backend, import_module(support.BACKENDS[backend]))
