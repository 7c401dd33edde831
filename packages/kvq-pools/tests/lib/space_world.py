"""A space over a real pool in which every row says which tokens it was computed from.

A sequence's row at a position is a function of its adapter and of all its tokens up to there,
so whoever reads a row that other tokens wrote reads other values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import kvq_codecs
from kvq_pools import (
    CacheSpace,
    Pool,
    PoolPlan,
    Rebuilt,
    SequencePages,
    Slab,
    Tier,
    hybrid_swa,
    mha,
    qsa,
    rebuild,
)


def plan_of(
    family: str,
    page_tokens: int,
    *,
    codec: str = "fp32",
    dim: int = 3,
    window: int = 6,
    window_pages: int = 8,
    max_requests: int = 3,
) -> PoolPlan:
    """One or two layers of one head; qsa has 2 tokens a group."""
    spec = kvq_codecs.get(codec).spec
    shared: Any = {"kv_heads": 1, "head_dim": dim, "k": spec, "v": spec, "page_tokens": page_tokens}
    if family == "mha":
        return mha(layers=(0,), **shared)
    if family == "qsa":
        index: Any = {"index": kvq_codecs.get("bf16").spec, "index_dim": 3, "ratio": 2}
        return qsa(layers=(0,), max_requests=max_requests, max_step_tokens=4, **index, **shared)
    full = (0,) if family == "hybrid_swa" else ()
    pages = window_pages if full else None
    return hybrid_swa(
        full_layers=full, window_layers=(1,), window=window, window_pages=pages, **shared
    )


class World:
    """A pool, its space, and what each sequence should read.

    `fill` is what free pages hold: bytes, or None to leave in them what was there.
    """

    def __init__(
        self,
        plan: PoolPlan,
        num_pages: int,
        *,
        prefix_cache: bool = True,
        namespace: str = "",
        copy: bool = True,
        fill: int | None = 0xFF,
        empty: Any = np.empty,
    ) -> None:
        self.pool = Pool(plan, num_pages, empty)
        self.space = CacheSpace(
            plan,
            num_pages,
            prefix_cache=prefix_cache,
            namespace=namespace,
            copy_page=self.pool.copy_page if copy else None,
        )
        self.fill = fill
        self.live: dict[SequencePages, list[int]] = {}
        self._histories: dict[tuple[int, object], int] = {}
        self.computed: set[tuple[str, tuple[int, ...]]] = set()

    def open(self, tokens: Sequence[int], adapter: str = "") -> SequencePages:
        sequence = self.space.open(tokens, adapter)
        self.live[sequence] = list(tokens)
        return sequence

    def compute(self, sequence: SequencePages, count: int, *, told: bool = True) -> None:
        """Grow by so many of its tokens, store their rows, read all they see, and advance."""
        tokens = self.live[sequence]
        begin, end = sequence.num_computed, sequence.num_computed + count
        assert end <= len(tokens)
        sequence.grow(end)
        for tier in self.pool.plan.tiers:
            for slab in tier.slabs:
                self._store(tier, slab, sequence, begin, end)
        self.check_reads(sequence, begin, end)
        sequence.advance(end, tokens if told else None)

    def run(self, tokens: Sequence[int], adapter: str = "", step: int = 1000) -> SequencePages:
        """Open with these tokens and compute them all."""
        sequence = self.open(tokens, adapter)
        while sequence.num_computed < len(tokens):
            self.compute(sequence, min(step, len(tokens) - sequence.num_computed))
        return sequence

    def fork(self, sequence: SequencePages) -> SequencePages:
        twin = sequence.fork()
        self.live[twin] = list(self.live[sequence])
        return twin

    def close(self, sequence: SequencePages) -> None:
        del self.live[sequence]
        sequence.close()

    def rebuild(self, num_pages: int, **arguments: Any) -> Rebuilt:
        done = rebuild(self.pool, self.space, num_pages, **arguments)
        for sequence in done.dropped:
            del self.live[sequence]
        return done

    def check(self) -> None:
        """Everything is accounted for, free pages are poison, and all read what they should."""
        self.space.check_integrity()
        assert (self.pool.plan, self.pool.num_pages) == (self.space.plan, self.space.num_pages)
        self.poison()
        for sequence in self.live:
            self.check_reads(sequence, sequence.num_computed, sequence.num_computed)

    def poison(self) -> None:
        """Fill what nobody owns."""
        if self.fill is None:
            return
        for tier in self.pool.plan.tiers:
            allocator = self.space._allocators.get(tier.name)
            pages = self.pool.pages(tier.name)
            free = [p for p in range(pages + 1) if allocator is None or not allocator.owners(p)]
            for slab in tier.slabs:
                for layer in slab.layers:
                    for plane in self.pool.view(slab.name, layer).planes.values():
                        items = plane.view(np.uint8)
                        items[free] = self.fill
                        if plane.dtype.kind == "f":
                            plane[free] = np.nan

    def check_reads(self, sequence: SequencePages, begin: int, end: int) -> None:
        """Queries at [begin, end] find in every tier the rows of the sequence's own tokens."""
        for tier in self.pool.plan.tiers:
            for slab in tier.slabs:
                positions = self._visible(tier, slab, sequence, begin, end)
                if positions is None:
                    continue
                got = self.read(tier, slab, sequence, positions)
                ids = self.histories(sequence)[positions]
                for layer, rows in got.items():
                    wanted = self._decoded(slab, ids, layer)
                    assert np.array_equal(rows, wanted), (tier.name, slab.name, positions, rows)

    def read(
        self, tier: Tier, slab: Slab, sequence: SequencePages, positions: np.ndarray
    ) -> dict[int, np.ndarray]:
        """Decoded rows float32 [positions, heads, dim] of each layer."""
        pages, rows = self._places(tier, slab, sequence, positions)
        codec = kvq_codecs.get(slab.spec.name)
        views = {layer: self.pool.view(slab.name, layer) for layer in slab.layers}
        return {n: codec.decode(v.map(lambda a: a[pages, :, rows])) for n, v in views.items()}

    def histories(self, sequence: SequencePages) -> np.ndarray:
        """A number for each of the sequence's tokens that stands for all tokens up to there."""
        at = self._histories.setdefault((-1, sequence.adapter), len(self._histories))
        ids = []
        for token in self.live[sequence]:
            at = self._histories.setdefault((at, token), len(self._histories))
            ids.append(at)
        return np.asarray(ids, np.int64)

    def _visible(
        self, tier: Tier, slab: Slab, sequence: SequencePages, begin: int, end: int
    ) -> np.ndarray | None:
        """Positions whose rows queries at [begin, end] read, those of [begin, end) included."""
        if tier.scope == "step":
            return None
        if tier.scope == "request":
            if not sequence.tables[tier.name]:
                return None
            slots = tier.slots(self.pool.plan.page_tokens)
            return np.arange(end // slots * slots, end)  # the group that is open
        first = 0 if tier.window is None else max(0, begin - tier.window + 1)
        positions = np.arange(first, end)
        group = slab.slots_per_row  # a row belongs to the token that closes its group
        return positions[(positions + 1) % group == 0]

    def _places(
        self, tier: Tier, slab: Slab, sequence: SequencePages, positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        slots = tier.slots(self.pool.plan.page_tokens)
        if tier.scope == "request":
            return np.full(len(positions), sequence.tables[tier.name][0]), positions % slots
        if not len(positions):
            return positions, positions
        start = int(positions[0])
        at = sequence.slots(tier.name, start, int(positions[-1]) + 1)[positions - start]
        return at // slots, at % slots // slab.slots_per_row

    def _store(self, tier: Tier, slab: Slab, sequence: SequencePages, begin: int, end: int) -> None:
        if tier.scope == "step":
            return
        positions = np.arange(begin, end)
        positions = positions[(positions + 1) % slab.slots_per_row == 0]
        if tier.scope == "request":
            positions = positions[-tier.slots(self.pool.plan.page_tokens) :]
        pages, rows = self._places(tier, slab, sequence, positions)
        ids = self.histories(sequence)[positions]
        codec = kvq_codecs.get(slab.spec.name)
        for layer in slab.layers:
            encoded = codec.encode(_rows(slab, ids, layer))
            for name, plane in self.pool.view(slab.name, layer).planes.items():
                plane[pages, :, rows] = encoded.planes[name]

    def _decoded(self, slab: Slab, ids: np.ndarray, layer: int) -> np.ndarray:
        codec = kvq_codecs.get(slab.spec.name)
        return np.asarray(codec.decode(codec.encode(_rows(slab, ids, layer))))


def _rows(slab: Slab, ids: np.ndarray, layer: int) -> np.ndarray:
    """Rows float32 [ids, heads, dim] that differ for ids below 128³; bf16 holds them exactly."""
    digits = np.stack([ids % 128, ids // 128 % 128, ids // 128**2], -1) + 1
    salt = layer + sum(map(ord, slab.name))
    values = digits[:, (np.arange(slab.dim) + salt) % 3]
    return np.repeat(values[:, None], slab.heads, 1).astype(np.float32)
