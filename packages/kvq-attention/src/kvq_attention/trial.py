"""A small cache whose bytes and attention are known: what `selfcheck` tries the ops on.

Bytes are those of the codecs by NumPy; attention is in float64 over the rows that the codecs
decode, by NumPy too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

import kvq_codecs
from kvq_attention import ops
from kvq_attention.accuracy import relative_error
from kvq_attention.batch import Batch, Table
from kvq_attention.errors import TensorError
from kvq_attention.layer import MOST_VALUES, STEP_TOKENS, Layer, attention
from kvq_attention.routes import Route
from kvq_codecs import Encoded

__all__ = ["Layer", "Trial"]

TIER = "trial"
SPARE_PAGES = 3
V_GAIN = 37.0  # so that a swapped scale shows
JUDGED = 8  # query tokens of a step at most: float64 attention on a CPU takes its time


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """Requests of several lengths on pages in random order; all other bytes are 0xFF.

    Attributes
    ----------
    q : [S, Hq, D], queries of each request's step, its last `STEP_TOKENS` tokens at most
    k, v : [T, Hkv, D], all requests' rows
    sinks : [Hq], if the layer has them
    slots : int64 [T]
    pages : each request's
    lengths : tokens of each request
    spare : pages of nobody
    k_expected, v_expected : the caches once all is stored, NumPy planes
    """

    layer: Layer
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None
    slots: torch.Tensor
    pages: list[list[int]]
    lengths: list[int]
    spare: list[int]
    k_expected: Encoded
    v_expected: Encoded

    @classmethod
    def of(cls, pair: tuple[str, str], layer: Layer, device: str, dtype: torch.dtype) -> Trial:
        if layer.values > MOST_VALUES:
            raise TensorError(
                f"heads · head_dim · page_tokens must be at most {MOST_VALUES:,} in a trial, got "
                f"{layer.values:,}; take fewer heads or a smaller page"
            )
        random = np.random.default_rng(0)
        n = layer.page_tokens
        lengths = [1, n, n + 1, 3 * n - 1]
        counts = [-(-length // n) for length in lengths]
        num_pages = sum(counts) + SPARE_PAGES
        ids = random.permutation(num_pages).tolist()
        pages = [[ids.pop() for _ in range(count)] for count in counts]
        slots = np.concatenate(
            [
                [own[p // n] * n + p % n for p in range(length)]
                for own, length in zip(pages, lengths, strict=True)
            ]
        )

        def normal(count: int, heads: int) -> torch.Tensor:
            values = random.standard_normal((count, heads, layer.head_dim))
            return torch.from_numpy(values).to(dtype)

        k, v = normal(len(slots), layer.kv_heads), V_GAIN * normal(len(slots), layer.kv_heads)
        q = normal(sum(min(length, STEP_TOKENS) for length in lengths), layer.heads)
        logits = random.standard_normal(layer.heads)
        sinks = torch.from_numpy(logits).float().to(device) if layer.sinks else None
        caches = [
            _stored(codec, num_pages, layer, rows, slots)
            for codec, rows in zip(pair, (k, v), strict=True)
        ]
        where = torch.from_numpy(slots.astype(np.int64)).to(device)
        k, v = k.to(device), v.to(device)
        return cls(layer, q.to(device), k, v, sinks, where, pages, lengths, ids, *caches)

    @property
    def expected(self) -> tuple[Encoded, Encoded]:
        """Both caches once all is stored."""
        return self.k_expected, self.v_expected

    def store(self, backend: str) -> int:
        """Rows that a store of everything, between two tokens of padding, gets wrong."""
        k_cache, v_cache = (self._on_device(cache.map(_blank)) for cache in self.expected)
        padding = torch.full((1,), -1, dtype=torch.int64, device=self.slots.device)
        slots = torch.cat([padding, self.slots, padding])
        k, v = (torch.cat([x[:1], x, x[:1]]) for x in (self.k, self.v))
        ops.store(k, v, k_cache, v_cache, slots, backend=backend)
        return _wrong_rows(k_cache, self.k_expected) + _wrong_rows(v_cache, self.v_expected)

    def decode(self, backend: str) -> float:
        """The largest relative error of the last queries of each request."""
        k_cache, v_cache = map(self._on_device, self.expected)
        counts = [min(count, self.layer.queries) for count in self._steps]
        own = zip(torch.split(self.q, self._steps), counts, strict=True)
        q = torch.cat([queries[-count:] for queries, count in own])
        batch = replace(self._batch(counts), any_cut=self.layer.any_cut)
        out = ops.decode(q, k_cache, v_cache, batch, TIER, backend=backend, **self._options())
        requests = zip(torch.split(q, counts), *map(self._decoded, self.expected), strict=True)
        return relative_error(out.cpu(), torch.cat([self._attention(*each) for each in requests]))

    def extend(self, backend: str, route: Route | None = None, tokens: int = 0) -> float:
        """The largest relative error of queries of each request's step, which is not stored.

        route : that is taken; tokens : of the last request's step at least
        """
        step, counts, options = self._last(self._steps), self._steps, self._options()
        pasts = [length - count for length, count in zip(self.lengths, counts, strict=True)]
        counts[-1] = max(counts[-1], tokens)
        if route is not None:
            options["route"] = route
        q, k, v = (_longer(x, sum(counts)) for x in (self.q, self.k[step], self.v[step]))
        k_cache, v_cache = (self._on_device(self._without(step, c)) for c in self.expected)
        batch = self._batch(counts, pasts)
        if route is not None:
            batch = replace(batch, host=tuple(batch.requests()))
        out = ops.extend(q, k, v, k_cache, v_cache, batch, TIER, backend=backend, **options).cpu()
        own = zip(*(torch.split(x.cpu(), counts) for x in (out, q, k, v)), strict=True)
        errors = [0.0 if out.isfinite().all() else math.inf]
        for past, (got, q, *new), *old in zip(
            pasts, own, *map(self._decoded, self.expected), strict=True
        ):
            keys, values = (
                torch.cat([a[:past], b.double()]) for a, b in zip(old, new, strict=True)
            )
            judged = torch.linspace(0, len(q) - 1, min(len(q), JUDGED)).long()
            wanted = [
                self._attention(q[i : i + 1], keys[: past + i + 1], values[: past + i + 1])
                for i in judged.tolist()
            ]
            errors.append(relative_error(got[judged], torch.cat(wanted)))
        return max(errors)

    def copy_pages(self, backend: str) -> int:
        """Rows that are wrong after the last request's first pages were copied to spare ones."""
        caches = [self._on_device(cache) for cache in self.expected]
        sources, targets = self.pages[-1][:2], self.spare[:2]
        ids = [
            torch.tensor([-1, *pages], dtype=torch.int64, device=self.slots.device)
            for pages in (sources, targets)
        ]
        ops.copy_pages(caches, *ids, backend=backend)
        for cache in self.expected:
            for plane in cache.planes.values():
                plane[targets] = plane[sources]
        return sum(map(_wrong_rows, caches, self.expected))

    def _on_device(self, cache: Encoded) -> Encoded:
        return cache.map(lambda plane: torch.from_numpy(plane.copy()).to(self.slots.device))

    def _options(self) -> dict[str, Any]:
        """How scores are made, for `ops`."""
        return {**self.layer.scoring(), "sinks": self.sinks}

    def _attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The last queries q [n, Hq, D] of a request over k [L, Hkv, D], v: float64 [n, Hq, D]."""
        past = len(k) - len(q)
        options = self._options()
        return torch.stack(
            [
                attention(one, k[: past + i + 1], v[: past + i + 1], **options)
                for i, one in enumerate(q.cpu().double())
            ]
        )

    @property
    def _steps(self) -> list[int]:
        """Tokens of each request's step."""
        return [min(length, STEP_TOKENS) for length in self.lengths]

    def _last(self, counts: list[int]) -> torch.Tensor:
        """Rows of so many last tokens of each request, int64."""
        stops = np.cumsum(self.lengths)
        rows = [np.arange(stop - n, stop) for stop, n in zip(stops, counts, strict=True)]
        return torch.from_numpy(np.concatenate(rows)).to(self.slots.device)

    def _without(self, rows: torch.Tensor, cache: Encoded) -> Encoded:
        """A cache on the host that lacks the tokens of some rows: 0xFF lies in their slots."""
        page, offset = np.divmod(self.slots[rows].cpu().numpy(), self.layer.page_tokens)

        def lacking(plane: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            found = plane.copy()
            found[page, :, offset] = _blank(plane[page, :, offset])
            return found

        return cache.map(lacking)

    def _batch(self, counts: list[int], pasts: list[int] | None = None) -> Batch:
        """Steps of so many last tokens of each request, or of so many behind its past.

        Those of the last request for which there are no slots are not to be stored.
        """

        def tensor(values: object, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=self.slots.device)

        width = max(map(len, self.pages))
        table = [own + [-1] * (width - len(own)) for own in self.pages]
        lengths, stored = self.lengths, counts
        if pasts is not None:
            lengths = [past + count for past, count in zip(pasts, counts, strict=True)]
            stored = self._steps
        slots = self.slots[self._last(stored)]
        slots = torch.nn.functional.pad(slots, (0, sum(counts) - len(slots)), value=-1)
        return Batch(
            query_offsets=tensor(np.cumsum([0, *counts]).tolist(), torch.int32),
            seq_lens=tensor(lengths, torch.int32),
            tables={TIER: Table(tensor(table, torch.int32), slots)},
            page_tokens=self.layer.page_tokens,
        )

    def _decoded(self, cache: Encoded) -> list[torch.Tensor]:
        """Each request's rows float64 [L, Hkv, D]."""
        n = self.layer.page_tokens
        page, offset = np.divmod(self.slots.cpu().numpy(), n)
        packed = cache.map(lambda plane: plane[page, :, offset])
        rows = torch.from_numpy(kvq_codecs.get(cache.spec.name).decode(packed)).double()
        return list(torch.split(rows, self.lengths))


def _stored(
    codec: str, num_pages: int, layer: Layer, rows: torch.Tensor, slots: np.ndarray[Any, Any]
) -> Encoded:
    """A cache on the host with rows [T, Hkv, D] in their slots and 0xFF everywhere else."""
    found = kvq_codecs.get(codec)
    given = rows.to(torch.float64 if rows.dtype == torch.float64 else torch.float32).numpy()
    encoded = found.encode(given)
    page, offset = np.divmod(slots, layer.page_tokens)
    planes = {}
    for plane in found.spec.planes:
        lead = num_pages, layer.kv_heads, layer.page_tokens
        planes[plane.name] = _blank(np.empty((*lead, plane.row_items(layer.head_dim)), plane.dtype))
        planes[plane.name][page, :, offset] = encoded.planes[plane.name]
    return Encoded(found.spec, layer.head_dim, planes)


def _longer(rows: torch.Tensor, count: int) -> torch.Tensor:
    """So many rows [count, H, D]: what is missing is random, with the same spread."""
    random = torch.Generator().manual_seed(1)
    more = torch.randn(count - len(rows), *rows.shape[1:], generator=random)
    return torch.cat([rows, (more * rows.cpu().float().std()).to(rows)])


def _blank(plane: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same shape and type, all bytes 0xFF: NaN wherever a plane can say so."""
    return np.full((*plane.shape[:-1], plane.shape[-1] * plane.itemsize), 0xFF, np.uint8).view(
        plane.dtype
    )


def _wrong_rows(cache: Encoded, expected: Encoded) -> int:
    """Rows [page, head, offset] any of whose bytes differ."""
    wrong = np.zeros(expected.lead, bool)
    for name, plane in expected.planes.items():
        got = cache.planes[name].cpu().contiguous().view(torch.uint8).numpy()
        wrong |= (got != plane.view(np.uint8)).any(axis=-1)
    return int(wrong.sum())
