"""The pages of running sequences, in all tiers at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvq_pools.errors import IntegrityError, OutOfPages, PageError, whole_number
from kvq_pools.pages import NO_PAGE, PageAllocator, pages_for_tokens, slots
from kvq_pools.plan import PoolPlan, Tier
from kvq_pools.window import first_visible, window_pages_per_request


class CacheSpace:
    """The allocators of all tiers of a pool and the sequences that hold their pages."""

    def __init__(self, plan: PoolPlan, num_pages: int) -> None:
        self.plan = plan
        self.num_pages = whole_number("num_pages", num_pages, 1)
        self._allocators = {t.name: PageAllocator(t.pages(num_pages)) for t in plan.tiers}
        self._sequences: set[SequencePages] = set()

    def open(self) -> SequencePages:
        """A new sequence without pages."""
        sequence = SequencePages(self)
        self._sequences.add(sequence)
        return sequence

    def num_free(self, tier: str) -> int:
        """Free pages of a tier; KeyError if there is none of that name."""
        return self._allocators[self.plan.tier(tier).name].num_free

    def fits(self, num_tokens: int, step_tokens: int = 1) -> bool:
        """Whether a sequence of that length fits the empty pool, computed in such steps."""
        return all(
            self._most_pages(tier, num_tokens, step_tokens) <= tier.pages(self.num_pages)
            for tier in self.plan.tiers
        )

    def can_open(self, num_tokens: int, step_tokens: int = 1) -> bool:
        """Whether a new sequence can reach that length with the pages that are free now.

        `step_tokens`: most tokens it grows by before each `SequencePages.advance`.
        """
        return all(
            self._most_pages(tier, num_tokens, step_tokens) <= self.num_free(tier.name)
            for tier in self.plan.tiers
        )

    def can_grow(self, sequence: SequencePages, num_tokens: int) -> bool:
        """Whether `sequence.grow(num_tokens)` would succeed now."""
        if sequence not in self._sequences:
            raise PageError("the sequence is closed or belongs to another space")
        return all(
            missing <= self._allocators[tier].num_free
            for tier, missing in sequence._missing(num_tokens).items()
        )

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless every page is accounted for and every table is right."""
        for sequence in self._sequences:
            sequence._check()
        held = {tier: allocator.num_pages for tier, allocator in self._allocators.items()}
        planned = {tier.name: tier.pages(self.num_pages) for tier in self.plan.tiers}
        if held != planned:
            raise IntegrityError(f"allocators have {held} pages, the plan gives {planned}")
        for tier, allocator in self._allocators.items():
            allocator.check_integrity(
                [p for p in sequence.tables[tier] if p != NO_PAGE] for sequence in self._sequences
            )

    def _most_pages(self, tier: Tier, num_tokens: int, step_tokens: int) -> int:
        """Most pages of a tier that a sequence holds at once on its way to that length."""
        pages = pages_for_tokens(num_tokens, self.plan.page_tokens)
        if tier.window is None:
            return pages
        most = window_pages_per_request(tier.window, step_tokens, self.plan.page_tokens)
        return min(pages, most)


class SequencePages:
    """One sequence's pages in every tier; `CacheSpace.open` makes them.

    Attributes
    ----------
    tables : tier → pages; index = position // page_tokens, -1 = released. Read, never write.
    num_tokens : positions [0, num_tokens) have pages, or had them
    num_computed : positions [0, num_computed) were computed; queries come from there on

    A step grows the sequence, computes, and advances it:

        0 ···· released | visible ···· num_computed ···· num_tokens
    """

    __slots__ = ("_kept_from", "_space", "num_computed", "num_tokens", "tables")

    def __init__(self, space: CacheSpace) -> None:
        self._space = space
        self._kept_from = {tier.name: 0 for tier in space.plan.tiers}  # index into the table
        self.tables: dict[str, list[int]] = {tier.name: [] for tier in space.plan.tiers}
        self.num_tokens = 0
        self.num_computed = 0

    def grow(self, num_tokens: int) -> None:
        """Have pages for positions [0, num_tokens), in all tiers or, on `OutOfPages`, in none.

        Nothing happens when they are there already.
        """
        self._check_open()
        wanted = self._missing(num_tokens)
        allocators = self._space._allocators
        for tier, missing in wanted.items():
            allocator = allocators[tier]
            if missing > allocator.num_free:
                raise OutOfPages(
                    missing,
                    allocator.num_free,
                    allocator.num_pages,
                    f" in tier {tier!r} to grow from {self.num_tokens} to {num_tokens} tokens",
                )
        for tier, missing in wanted.items():
            self.tables[tier] += allocators[tier].alloc(missing)
        self.num_tokens = max(self.num_tokens, num_tokens)

    def advance(self, num_computed: int) -> None:
        """Note that positions [0, num_computed) were computed.

        Pages of window tiers that no query at num_computed or later can see are released.
        """
        self._check_open()
        whole_number("num_computed", num_computed)
        if not self.num_computed <= num_computed <= self.num_tokens:
            raise PageError(
                f"num_computed must be {self.num_computed} … {self.num_tokens} (what was computed "
                f"before … what has pages), got {num_computed}; to go back, close and open anew"
            )
        self.num_computed = num_computed
        for tier in self._space.plan.tiers:
            if tier.window is None:
                continue
            kept_from = self._first_kept(tier.window)
            table, done = self.tables[tier.name], self._kept_from[tier.name]
            self._space._allocators[tier.name].release(table[done:kept_from])
            table[done:kept_from] = [NO_PAGE] * (kept_from - done)
            self._kept_from[tier.name] = kept_from

    def slots(self, tier: str, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Slots int64 [stop - start] of positions [start, stop); `PageError` if one has no page."""
        return slots(self.tables[tier], start, stop, self._space.plan.page_tokens)

    def close(self) -> None:
        """Release every page; harmless when closed already."""
        if self not in self._space._sequences:
            return
        self._space._sequences.remove(self)
        for tier, table in self.tables.items():
            self._space._allocators[tier].release(table[self._kept_from[tier] :])
            table.clear()

    def _missing(self, num_tokens: int) -> dict[str, int]:
        """Pages to add in each tier to reach `num_tokens`."""
        pages = pages_for_tokens(num_tokens, self._space.plan.page_tokens)
        return {tier: max(0, pages - len(table)) for tier, table in self.tables.items()}

    def _first_kept(self, window: int) -> int:
        """Index of the first page that a query at num_computed sees."""
        return first_visible(self.num_computed, window) // self._space.plan.page_tokens

    def _check_open(self) -> None:
        if self not in self._space._sequences:
            raise PageError("the sequence is closed; open a new one")

    def _check(self) -> None:
        counts = self.num_computed, self.num_tokens
        if any(type(count) is not int for count in counts) or not 0 <= counts[0] <= counts[1]:
            raise IntegrityError(f"{counts[0]!r} of {counts[1]!r} tokens computed")
        tiers = {tier.name for tier in self._space.plan.tiers}
        if not tiers == self.tables.keys() == self._kept_from.keys():
            raise IntegrityError(
                f"tables of tiers {list(self.tables)}, releases of {list(self._kept_from)}; "
                f"the plan has {sorted(tiers)}"
            )
        pages = pages_for_tokens(self.num_tokens, self._space.plan.page_tokens)
        for tier in self._space.plan.tiers:
            table, noted = self.tables[tier.name], self._kept_from[tier.name]
            strange = [page for page in table if type(page) is not int]
            if strange:
                raise IntegrityError(f"tier {tier.name!r}: pages must be ints, found {strange[:8]}")
            kept_from = 0 if tier.window is None else self._first_kept(tier.window)
            released = [i for i, page in enumerate(table) if page == NO_PAGE]
            if len(table) != pages or noted != kept_from or released != list(range(kept_from)):
                raise IntegrityError(
                    f"tier {tier.name!r}: table of {len(table)} pages, {released[:8]} released, "
                    f"kept from {noted!r}; "
                    f"{self.num_tokens} tokens of which {self.num_computed} were computed take "
                    f"{pages}, the first {kept_from} released"
                )
