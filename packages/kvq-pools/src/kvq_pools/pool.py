"""A plan with memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvq_codecs import Encoded
from kvq_pools.errors import PageError, PlanError, whole_number
from kvq_pools.plan import PoolPlan, Tier

Array = Any  # NumPy, torch or CuPy: whatever `empty` returns
Empty = Callable[[tuple[int, ...], str], Array]


class Pool:
    """The only owner of cache memory.

    Parameters
    ----------
    plan : what to store
    num_pages : usable pages of each tier that grows
    empty : (shape, dtype name) → a new array of that shape; NumPy's by default. The names are
        those of plane dtypes: uint8, uint16, float16, float32. Its contents do not matter.

    Attributes
    ----------
    plan, num_pages : as given

    Each plane of a slab has one buffer
    [layers, pages + 1, heads, slots of a page / slots_per_row, items]; the last page is padding.
    """

    def __init__(self, plan: PoolPlan, num_pages: int, empty: Empty = np.empty) -> None:
        self.plan = plan
        self.num_pages = whole_number("num_pages", num_pages, 1)
        self._buffers: dict[str, list[Array]] = {tier.name: [] for tier in plan.tiers}
        self._views: dict[tuple[str, int], Encoded] = {}
        for tier in plan.tiers:
            self._add(tier, empty)

    @property
    def nbytes(self) -> int:
        """Bytes of the live buffers; equals `plan.nbytes(num_pages)`."""
        return sum(int(buffer.nbytes) for tier in self._buffers.values() for buffer in tier)

    def view(self, slab: str, layer: int) -> Encoded:
        """Rows [pages + 1, heads, slots / slots_per_row] of a layer; KeyError if unmapped.

        Planes alias the pool's memory. Ask again each step, do not keep them.
        """
        try:
            return self._views[slab, layer]
        except KeyError:
            self.plan.slab(slab, layer)  # its error says what is stored
            raise

    def pages(self, tier: str) -> int:
        """Usable pages of a tier: ids 0 … pages - 1."""
        return self.plan.tier(tier).pages(self.num_pages)

    def padding_page(self, tier: str) -> int:
        """The page that belongs to nobody: what is written there is never read."""
        return self.pages(tier)

    def copy_page(self, tier: str, source: int, target: int) -> None:
        """Copy a page of a tier, in all its slabs, planes and layers; `PageError` if none such."""
        pages = self.pages(tier)
        for page in (source, target):
            if whole_number("a page", page) >= pages:
                raise PageError(f"tier {tier!r} has pages 0 … {pages - 1}, got {page}")
        for buffer in self._buffers[tier]:
            buffer[:, target] = buffer[:, source]

    def _add(self, tier: Tier, empty: Empty) -> None:
        pages, page_slots = tier.pages(self.num_pages) + 1, tier.slots(self.plan.page_tokens)
        for slab in tier.slabs:
            planes = {}
            for plane in slab.spec.planes:
                shape = slab.shape(plane, pages, page_slots)
                buffer = empty(shape, plane.dtype)
                if tuple(buffer.shape) != shape:
                    raise PlanError(
                        f"empty({shape}, {plane.dtype!r}) returned shape {tuple(buffer.shape)}"
                    )
                # Recycled bytes can decode to NaN, and NaN × 0 under a mask is still NaN.
                buffer[...] = 0
                planes[plane.name] = buffer
                self._buffers[tier.name].append(buffer)
            for row, layer in enumerate(slab.layers):
                layer_planes = {name: buffer[row] for name, buffer in planes.items()}
                self._views[slab.name, layer] = Encoded(slab.spec, slab.dim, layer_planes)
