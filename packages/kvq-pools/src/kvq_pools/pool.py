"""A plan with memory."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvq_codecs import Encoded
from kvq_pools.errors import (
    PageError,
    PlanError,
    PoolFailed,
    RebuildFailed,
    RebuildRejected,
    whole_number,
)
from kvq_pools.plan import PoolPlan, Tier
from kvq_pools.staging import Array, Piece, put, stage

Empty = Callable[[tuple[int, ...], str], Array]


class Pool:
    """The only owner of cache memory.

    Parameters
    ----------
    plan : what to store
    num_pages : usable pages of each tier that grows
    empty : (shape, dtype name) → a new array of that shape; NumPy's by default. The names are
        those of plane dtypes: uint8, uint16, float16, float32. Its contents do not matter.
    to_host : a slice of such an array → a copy in host memory that can be assigned to a slice
    on_free : called when `rebuild` has let go of the old memory and asks for none yet, so that a
        library which keeps freed memory for itself can give it back

    Attributes
    ----------
    plan, num_pages : as given, or as last rebuilt
    failed : why the pool has no memory; None while it has

    Each plane of a slab has one buffer
    [layers, pages + 1, heads, slots of a page / slots_per_row, items]; the last page is padding.
    """

    def __init__(
        self,
        plan: PoolPlan,
        num_pages: int,
        empty: Empty = np.empty,
        *,
        to_host: Callable[[Array], Array] = np.array,
        on_free: Callable[[], None] = lambda: None,
    ) -> None:
        self.plan = plan
        self.num_pages = whole_number("num_pages", num_pages, 1)
        self.failed: str | None = None
        self._empty, self._to_host, self._on_free = empty, to_host, on_free
        self._buffers: dict[str, list[Array]] = {}  # tier → one a plane of each slab
        self._views: dict[tuple[str, int], Encoded] = {}
        try:
            self._allocate(plan, num_pages)
        except BaseException as error:
            _let_go(error)
            self._drop()
            raise

    @property
    def nbytes(self) -> int:
        """Bytes of the live buffers; equals `plan.nbytes(num_pages)`, or 0 in a failed pool."""
        return sum(int(buffer.nbytes) for tier in self._buffers.values() for buffer in tier)

    def view(self, slab: str, layer: int) -> Encoded:
        """Rows [pages + 1, heads, slots / slots_per_row] of a layer; KeyError if unmapped.

        Planes alias the pool's memory. Ask again each step, do not keep them.
        """
        try:
            return self._views[slab, layer]
        except KeyError:
            self._check_usable()
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
        self._check_usable()
        _check_pages(f"tier {tier!r}", (source, target), self.pages(tier), PageError)
        for buffer in self._buffers[tier]:
            buffer[:, target] = buffer[:, source]

    def rebuild(
        self,
        num_pages: int,
        *,
        plan: PoolPlan | None = None,
        live: Mapping[str, Sequence[int]] | None = None,
        keep: Mapping[str, Mapping[int, int]] | None = None,
    ) -> None:
        """Give the pool another size or plan, in place; what is kept goes through host memory.

        Views and addresses from before are void: drop what holds them first, or that memory
        cannot be freed. Pages that `keep` does not name start zeroed.

        Parameters
        ----------
        num_pages : usable pages of each tier that grows
        plan : None = as now
        live : tier → pages in use, which come back bit for bit should the rebuild fail
        keep : tier → {page now: page after}; a tier whose rows are laid out anew keeps none

        Raises
        ------
        RebuildRejected : it cannot be done, or host memory is short; nothing was touched
        RebuildFailed : it failed on its way; size, plan, live and kept pages are as before
        PoolFailed : the way back failed too; the pool is `failed` from now on

        A KeyboardInterrupt on its way is raised again once everything is as before.
        """
        self._check_usable()
        after = plan_after(self.plan, plan)
        whole_number("num_pages", num_pages, 1, RebuildRejected)
        moves = {
            name: dict(_named(f"keep: tier {name!r}", pages))
            for name, pages in _named("keep", {} if keep is None else keep).items()
        }
        held = self._held({} if live is None else live, moves)
        self._check_keep(after, num_pages, moves)
        try:
            staged = {t: stage(self._buffers[t], held[t], self._to_host) for t in held}
        except BaseException as error:
            _let_go(error)
            if not isinstance(error, Exception):
                raise
            raise RebuildRejected(
                f"live pages cannot go to the host and back ({error!r}); nothing was touched: free "
                "host memory, or let to_host give what a slice can be set to"
            ) from error
        before = self.plan, self.num_pages
        goal = f"{num_pages} pages of {after.page_bytes:,} bytes"
        try:
            self._replace(after, num_pages, staged, moves, f"a rebuild to {goal} was interrupted")
        except BaseException as error:
            _let_go(error)
            reason = f"a rebuild to {goal} failed ({error!r}), and so did the way back"
            as_held = {tier: {page: page for page in held[tier]} for tier in held}
            try:
                self._replace(*before, staged, as_held, reason)
            except BaseException as second:
                _let_go(second)
                self._drop()
                self.failed = f"{reason} ({second!r})"
                raise PoolFailed(self._failure()) from second
            if not isinstance(error, Exception):
                raise
            raise RebuildFailed(
                f"a rebuild to {goal} failed: {error!r}; the pool has its {before[1]} pages and "
                "what was live in them"
            ) from error
        finally:
            staged.clear()  # whoever keeps the error must not keep the copies

    def _replace(
        self,
        plan: PoolPlan,
        num_pages: int,
        staged: Mapping[str, Sequence[Piece]],
        places: Mapping[str, Mapping[int, int]],
        reason: str,
    ) -> None:
        """New memory with staged pages at their places; `failed` for that reason until it is."""
        self.failed = reason
        self._drop()
        self._on_free()
        self._allocate(plan, num_pages)
        for tier, moves in places.items():
            put(self._buffers[tier], staged[tier], moves)
        self.plan, self.num_pages, self.failed = plan, num_pages, None

    def _drop(self) -> None:
        self._views.clear()
        for buffers in self._buffers.values():
            buffers.clear()  # what closures in the frames of an old error hold is the list
        self._buffers.clear()

    def _allocate(self, plan: PoolPlan, num_pages: int) -> None:
        for tier in plan.tiers:
            buffers = self._buffers[tier.name] = []
            for slab in tier.slabs:
                planes = {}
                for plane in slab.spec.planes:
                    shape = slab.shape(
                        plane, tier.pages(num_pages) + 1, tier.slots(plan.page_tokens)
                    )
                    buffer = self._empty(shape, plane.dtype)
                    if tuple(buffer.shape) != shape:
                        raise PlanError(
                            f"empty({shape}, {plane.dtype!r}) returned shape {tuple(buffer.shape)}"
                        )
                    # Recycled bytes can decode to NaN, and NaN × 0 under a mask is still NaN.
                    buffer[...] = 0
                    planes[plane.name] = buffer
                    buffers.append(buffer)
                for row, layer in enumerate(slab.layers):
                    layer_planes = {name: buffer[row] for name, buffer in planes.items()}
                    self._views[slab.name, layer] = Encoded(slab.spec, slab.dim, layer_planes)

    def _held(
        self, live: Mapping[str, Sequence[int]], keep: Mapping[str, Mapping[int, int]]
    ) -> dict[str, set[int]]:
        """Pages of each tier that a rebuild must not lose until it is done."""
        held: dict[str, set[int]] = {}
        for what, given in (("live", live), ("keep", keep)):
            for name, pages in _named(what, given).items():
                limit = _tier(self.plan, name, what).pages(self.num_pages)
                held.setdefault(name, set()).update(
                    _check_pages(f"{what}: tier {name!r}", pages, limit, RebuildRejected)
                )
        return held

    def _check_keep(
        self, plan: PoolPlan, num_pages: int, keep: Mapping[str, Mapping[int, int]]
    ) -> None:
        for name, moves in keep.items():
            now, after = self.plan.tier(name), _tier(plan, name, "keep")
            if _rows(now, self.plan) != _rows(after, plan):
                raise RebuildRejected(
                    f"keep: tier {name!r} is laid out anew, so that no page of it can be kept"
                )
            places = list(moves.values())
            limit = after.pages(num_pages)
            _check_pages(f"keep: tier {name!r} after the rebuild", places, limit, RebuildRejected)
            if len(set(places)) < len(places):
                raise RebuildRejected(f"keep: two pages of tier {name!r} go to the same page")

    def _check_usable(self) -> None:
        if self.failed is not None:
            raise PoolFailed(self._failure())

    def _failure(self) -> str:
        return f"the pool has no memory: {self.failed}; make a new pool"


def _let_go(error: BaseException) -> None:
    """Drop the buffers that the frames of an error hold: whoever keeps it must not keep them."""
    traceback.clear_frames(error.__traceback__)


def _rows(tier: Tier, plan: PoolPlan) -> tuple[object, ...]:
    """What must be equal for a page's bytes to mean the same in two plans."""
    return tier.slabs, tier.window, tier.scope, tier.slots(plan.page_tokens)


def _tier(plan: PoolPlan, name: str, what: str) -> Tier:
    try:
        return plan.tier(name)
    except KeyError as error:
        raise RebuildRejected(f"{what}: {error.args[0]}") from None


def plan_after(now: PoolPlan, plan: PoolPlan | None) -> PoolPlan:
    """The plan of a rebuild, None = as now; `RebuildRejected` for what is no plan."""
    if plan is not None and not isinstance(plan, PoolPlan):
        raise RebuildRejected(f"plan must be a PoolPlan, or None for the one as now, got {plan!r}")
    return now if plan is None else plan


def _named(what: str, given: Mapping[Any, Any]) -> Mapping[Any, Any]:
    if not isinstance(given, Mapping):
        raise RebuildRejected(f"{what} must be a mapping, got {given!r}")
    return given


def _check_pages(what: str, pages: Iterable[int], limit: int, error: type[ValueError]) -> list[int]:
    """The pages as a list: what they come from may be read only once."""
    if not isinstance(pages, Iterable):
        raise error(f"{what}: pages must be a list of ints, got {pages!r}")
    named = list(pages)
    for page in named:
        if whole_number(f"{what}: a page", page, 0, error) >= limit:
            raise error(f"{what} has pages 0 … {limit - 1}, got {page}")
    return named
