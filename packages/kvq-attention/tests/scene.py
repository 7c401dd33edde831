"""Requests with random K and V in a paged cache that this module fills without the ops.

Everything a kernel must not read is poisoned: all bytes of unused slots and pages are 0xFF, which
is NaN for every plane that can say so. Page tables are permuted and start after page 0. V is 37
times larger than K, so that a swapped scale shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import kvq_codecs
from kvq_attention import Batch, Table
from kvq_codecs import Encoded

from . import oracle

TIER = "full"
V_GAIN = 37.0
SPARE_PAGES = 3
ALL_DIMS = (64, 80, 96, 128, 256)


def dims_of(codec: str) -> list[int]:
    """The head_dims of interest that a codec stores."""
    divisor = kvq_codecs.get(codec).spec.divisor
    return [dim for dim in ALL_DIMS if dim % divisor == 0]


@dataclass(frozen=True)
class Geometry:
    """The shape of a scene; `queries` are the last tokens of each request."""

    k: str = "q8_0"
    v: str | None = None
    heads: int = 2
    kv_heads: int = 2
    dim: int = 64
    v_dim: int | None = None
    page_tokens: int = 16
    lengths: tuple[int, ...] = (1, 15, 16, 17, 53)
    queries: tuple[int, ...] | int = 1
    dtype: torch.dtype = torch.float32
    pads: tuple[int, int] = (0, 0)

    @property
    def codecs(self) -> tuple[str, str]:
        return self.k, self.v or self.k

    @property
    def dims(self) -> tuple[int, int]:
        return self.dim, self.v_dim or self.dim

    @property
    def counts(self) -> tuple[int, ...]:
        if isinstance(self.queries, int):
            return tuple(min(self.queries, length) for length in self.lengths)
        return self.queries


@dataclass(frozen=True)
class Scene:
    """Per request: raw k [L, Hkv, D], v [L, Hkv, Dv], q [n, Hq, D], pages; and the caches."""

    geometry: Geometry
    ks: list[torch.Tensor]
    vs: list[torch.Tensor]
    qs: list[torch.Tensor]
    pages: list[list[int]]
    k_cache: Encoded
    v_cache: Encoded

    @property
    def caches(self) -> tuple[Encoded, Encoded]:
        return self.k_cache, self.v_cache

    @property
    def scale(self) -> float:
        return self.geometry.dim**-0.5

    @property
    def q(self) -> torch.Tensor:
        return torch.cat(self.qs)

    def fresh(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The step's own K and V rows, all requests'."""
        counts = self.geometry.counts
        tails = [
            [x[len(x) - n :] for x, n in zip(rows, counts, strict=True)]
            for rows in (self.ks, self.vs)
        ]
        return torch.cat(tails[0]), torch.cat(tails[1])

    def slots(self, index: int, start: int, stop: int) -> list[int]:
        """Slots of positions [start, stop) of a request."""
        n = self.geometry.page_tokens
        return [self.pages[index][p // n] * n + p % n for p in range(start, stop)]

    def batch(self, only: int | None = None, released: int = 0) -> Batch:
        """The step's batch, or one request's; −1 instead of each request's first pages."""
        wanted = range(len(self.qs)) if only is None else [only]
        lengths, counts = self.geometry.lengths, self.geometry.counts
        table = np.full((len(wanted), max(len(self.pages[r]) for r in wanted)), -1, np.int32)
        slots: list[int] = []
        for row, r in zip(table, wanted, strict=True):
            row[: len(self.pages[r])] = self.pages[r]
            row[:released] = -1
            slots += self.slots(r, lengths[r] - counts[r], lengths[r])
        offsets = np.cumsum([0, *(counts[r] for r in wanted)], dtype=np.int32)
        device = self.q.device

        def on_device(values: Any, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return Batch(
            query_offsets=on_device(offsets, torch.int32),
            seq_lens=on_device([lengths[r] for r in wanted], torch.int32),
            tables={
                TIER: Table(on_device(table, torch.int32), on_device(slots, torch.int64)),
            },
            page_tokens=self.geometry.page_tokens,
        )

    def expected(self, fresh: bool, **scoring: Any) -> torch.Tensor:
        """float64 attention of every request; the step's own K and V as they are, or stored."""
        outs = []
        for q, k, v, n in zip(self.qs, self.ks, self.vs, self.geometry.counts, strict=True):
            rows = [through(c, x) for c, x in zip(self.geometry.codecs, (k, v), strict=True)]
            if fresh:
                rows = [
                    torch.cat([stored[: len(x) - n], x[len(x) - n :].cpu().double()])
                    for stored, x in zip(rows, (k, v), strict=True)
                ]
            outs.append(oracle.attention(q, *rows, **{"scale": self.scale, **scoring}))
        return torch.cat(outs)


def build(geometry: Geometry, device: str = "cpu", *, stored_queries: bool, seed: int = 0) -> Scene:
    """A scene whose cache holds every token, the step's own included if `stored_queries`."""
    random = torch.Generator().manual_seed(seed)
    g = geometry

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(device, g.dtype)

    ks = [normal(length, g.kv_heads, g.dims[0]) for length in g.lengths]
    vs = [V_GAIN * normal(length, g.kv_heads, g.dims[1]) for length in g.lengths]
    qs = [normal(n, g.heads, g.dims[0]) for n in g.counts]
    sizes = [-(-length // g.page_tokens) for length in g.lengths]
    ids = (1 + torch.randperm(sum(sizes) + SPARE_PAGES, generator=random)).tolist()
    pages = [[ids.pop() for _ in range(size)] for size in sizes]
    num_pages = 1 + sum(sizes) + SPARE_PAGES
    caches = [
        poisoned(codec, num_pages, g.kv_heads, g.page_tokens, dim, device, pad=pad)
        for codec, dim, pad in zip(g.codecs, g.dims, g.pads, strict=True)
    ]
    scene = Scene(g, ks, vs, qs, pages, *caches)
    for r, (length, n) in enumerate(zip(g.lengths, g.counts, strict=True)):
        held = length if stored_queries else length - n
        for cache, rows in zip(caches, (ks[r], vs[r]), strict=True):
            put(cache, rows[:held], scene.slots(r, 0, held))
    return scene


def poisoned(
    codec: str, pages: int, heads: int, page_tokens: int, dim: int, device: str, pad: int = 0
) -> Encoded:
    """A cache of nothing but 0xFF bytes; `pad` dead items after each row, token and head."""
    spec = kvq_codecs.get(codec).spec
    planes = {}
    for plane in spec.planes:
        shape = pages, heads + pad, page_tokens + pad, plane.row_items(dim) + pad
        raw = np.full(shape, -1, f"int{8 * np.dtype(plane.dtype).itemsize}").view(plane.dtype)
        whole = torch.from_numpy(raw).to(device)
        planes[plane.name] = whole[:, :heads, :page_tokens, : plane.row_items(dim)]
    return Encoded(spec, dim, planes)


def put(cache: Encoded, rows: torch.Tensor, slots: list[int]) -> None:
    """Write rows [n, heads, dim] into their slots, encoded and scattered by NumPy."""
    encoded = kvq_codecs.get(cache.spec.name).encode(as_numpy(rows))
    page, offset = np.divmod(np.asarray(slots, np.int64), cache.lead[2])
    for name, plane in cache.planes.items():
        host = plane.cpu()
        host.numpy()[page, :, offset] = encoded.planes[name]
        plane.copy_(host)


def through(codec: str, rows: torch.Tensor) -> torch.Tensor:
    """Rows as they read back from a codec, by NumPy, float64 on the CPU."""
    c = kvq_codecs.get(codec)
    return torch.from_numpy(c.decode(c.encode(as_numpy(rows)))).double()


def as_numpy(rows: torch.Tensor) -> np.ndarray[Any, Any]:
    """The same values: NumPy has no bfloat16."""
    return rows.cpu().to(torch.float64 if rows.dtype == torch.float64 else torch.float32).numpy()


def assert_same_bytes(cache: Encoded, other: Encoded) -> None:
    """Every plane equal, byte for byte (NaN scales too)."""
    for name, plane in cache.planes.items():
        got = plane.cpu().contiguous().view(torch.uint8)
        wanted = other.planes[name].cpu().contiguous().view(torch.uint8)
        differing = (got != wanted).any(dim=-1).nonzero()
        assert len(differing) == 0, (
            f"{cache.spec.name}: {len(differing)} rows of plane {name!r} differ, the first at "
            f"[page, head, offset] {differing[0].tolist()}: "
            f"{bytes(got[tuple(differing[0])].tolist()).hex(' ')} instead of "
            f"{bytes(wanted[tuple(differing[0])].tolist()).hex(' ')}"
        )
