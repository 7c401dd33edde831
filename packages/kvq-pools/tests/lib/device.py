"""A device of a few bytes that fails when told to."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

import numpy as np

from kvq_pools import Pool


class Device:
    """Memory for a pool: counts what is alive, and fails at chosen steps.

    A step is an allocation, a copy to the host, or a write to a buffer (zeroing, copying back);
    `steps` lists those that were taken, by kind.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.live_bytes = 0
        self.steps: list[str] = []
        self.fail_at: Collection[int] = ()
        self.error: type[BaseException] = MemoryError
        self.freed: list[int] = []  # live bytes whenever the pool said that it let go

    def empty(self, shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
        self.step("allocate")
        memory = np.empty(shape, dtype)
        if (
            self.capacity_bytes is not None
            and self.live_bytes + memory.nbytes > self.capacity_bytes
        ):
            raise MemoryError(f"{self.live_bytes} bytes are alive, {memory.nbytes} more asked for")
        memory.view(np.uint8)[...] = 0xFF  # NaN as a float
        self.live_bytes += memory.nbytes
        weakref.finalize(memory, self._release, memory.nbytes)
        buffer = memory.view(Buffer)
        buffer.owner = self
        return buffer

    def to_host(self, pages: Any) -> np.ndarray[Any, Any]:
        self.step("stage")
        return np.array(pages)

    def on_free(self) -> None:
        self.freed.append(self.live_bytes)

    def step(self, kind: str) -> None:
        self.steps.append(kind)
        if len(self.steps) - 1 in self.fail_at:
            raise self.error(f"step {len(self.steps) - 1}, {kind}")

    def pool(self, *args: Any) -> Pool:
        """A pool in this memory; steps are counted from its first rebuild on."""
        pool = Pool(*args, self.empty, to_host=self.to_host, on_free=self.on_free)
        self.steps.clear()
        return pool

    def _release(self, nbytes: int) -> None:
        self.live_bytes -= nbytes


class Buffer(np.ndarray[Any, Any]):
    """An array each write to which is a step of its device."""

    owner: Device

    def __setitem__(self, key: Any, value: Any) -> None:
        self.owner.step("write")
        super().__setitem__(key, value)


def planes(pool: Pool, tier: str) -> list[np.ndarray[Any, Any]]:
    """Bytes [pages + 1, bytes of a page] of each plane of each slab and layer of a tier."""
    found = []
    for slab in pool.plan.tier(tier).slabs:
        for layer in slab.layers:
            for array in pool.view(slab.name, layer).planes.values():
                found.append(array.view(np.uint8).reshape(array.shape[0], -1))
    return found


def page_bytes(pool: Pool, tier: str, page: int) -> bytes:
    """All that a page of a tier holds."""
    return b"".join(plane[page].tobytes() for plane in planes(pool, tier))


def scribble(pool: Pool, seed: int = 0) -> None:
    """Fill the pool with random bytes: NaN scales and all."""
    rng = np.random.default_rng(seed)
    for tier in pool.plan.tiers:
        for plane in planes(pool, tier.name):
            plane[...] = rng.integers(0, 256, plane.shape, np.uint8)


class Lazy(np.ndarray[Any, Any]):
    """An array that is zero until written to, whatever its size; setting all of it does nothing."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if key is not ...:
            super().__setitem__(key, value)


def lazily_zeroed(shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    """An `empty` whose memory the system provides when it is written to: pools of many GiB."""
    return np.zeros(shape, dtype).view(Lazy)
