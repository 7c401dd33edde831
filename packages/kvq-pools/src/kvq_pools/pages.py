"""Pages: who owns how many, and where a position lies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from operator import index

import numpy as np
import numpy.typing as npt

from kvq_pools.errors import IntegrityError, OutOfPages, PageError, whole_number

NO_PAGE = -1


def pages_for_tokens(tokens: int, page_tokens: int) -> int:
    """Pages that hold that many tokens: whole pages, always."""
    whole_number("page_tokens", page_tokens, 1)
    return -(-whole_number("tokens", tokens) // page_tokens)


def slots(
    page_table: Sequence[int], start: int, stop: int, page_tokens: int
) -> npt.NDArray[np.int64]:
    """Slots int64 [stop - start] of positions [start, stop): page · page_tokens + offset.

    `page_table[i]` is the page of positions [i · page_tokens, (i + 1) · page_tokens). Raises
    `PageError` when the table does not reach `stop`, a page there was released, or its entry is
    no integer or so large that its slots are no int64.
    """
    whole_number("page_tokens", page_tokens, 1)
    whole_number("stop", stop, whole_number("start", start))
    room = len(page_table) * page_tokens
    if stop > room:
        raise PageError(f"positions [{start}, {stop}) reach beyond the {room} that have pages")
    first = start // page_tokens
    given = np.asarray(page_table[first : pages_for_tokens(stop, page_tokens)])
    largest = 2**63 // page_tokens - 1
    if given.size and (given.dtype.kind not in "iu" or int(given.max()) > largest):
        raise PageError(
            f"pages must be integers of at most {largest}, got {given.dtype} {given.tolist()[:8]}"
        )
    pages = given.astype(np.int64)
    positions = np.arange(start, stop, dtype=np.int64)
    page = pages[positions // page_tokens - first]
    if page.size and int(page.min()) < 0:
        gone = int(positions[page < 0][0])
        raise PageError(f"position {gone} has no page any more; no query may see it")
    return page * page_tokens + positions % page_tokens


class PageAllocator:
    """Reference-counted pages 0 … num_pages - 1.

    A page is unused (`_unused` and above: never handed out yet), free (given back) or owned
    (with a count). Bookkeeping takes memory for the pages in use, not for those of the pool.
    """

    __slots__ = ("_free", "_owners", "_unused", "num_pages")

    def __init__(self, num_pages: int) -> None:
        self.num_pages = whole_number("num_pages", num_pages, 1)
        self._unused = 0
        self._free: list[int] = []
        self._owners: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Pages that `alloc` can hand out."""
        return self.num_pages - len(self._owners)

    def alloc(self, count: int) -> list[int]:
        """`count` pages with one owner each, recently released ones first; `OutOfPages`."""
        if whole_number("count", count) > self.num_free:
            raise OutOfPages(count, self.num_free, self.num_pages)
        keep = max(0, len(self._free) - count)
        pages = self._free[keep:]
        del self._free[keep:]
        fresh = count - len(pages)
        pages.extend(range(self._unused, self._unused + fresh))
        self._unused += fresh
        self._owners.update(dict.fromkeys(pages, 1))
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """One more owner for each page; `PageError` unless all of them are owned."""
        for page, times in self._counted(pages, least=1).items():
            self._owners[page] += times

    def release(self, pages: Iterable[int]) -> None:
        """One owner less for each page; the last one frees it. `PageError`: none is released."""
        for page, times in self._counted(pages).items():
            if self._owners[page] > times:
                self._owners[page] -= times
            else:
                del self._owners[page]
                self._free.append(page)

    def check_integrity(self, owners: Iterable[Iterable[int]] | None = None) -> None:
        """Raise `IntegrityError` unless each page is unused, free or owned, exactly one of them.

        `owners`: the pages of each owner, when known; the counts must equal theirs.
        """
        records = self.num_pages, self._unused, *self._free, *self._owners, *self._owners.values()
        strange = [number for number in records if type(number) is not int]
        if strange:
            raise IntegrityError(f"pages and counts must be ints, found {strange[:8]}")
        free = set(self._free)
        both = free & self._owners.keys()
        if len(free) < len(self._free) or both:
            raise IntegrityError(f"pages free twice or free and owned: {sorted(both)[:8]}")
        if free | self._owners.keys() != set(range(self._unused)):
            raise IntegrityError(
                f"{len(free)} free and {len(self._owners)} owned pages are not "
                f"the {self._unused} that were handed out"
            )
        if not 0 <= self._unused <= self.num_pages or min(self._owners.values(), default=1) < 1:
            raise IntegrityError(f"{self._unused} of {self.num_pages} pages used, or a count of 0")
        if owners is not None:
            counted = Counter(page for owner in owners for page in owner)
            if counted != self._owners:
                wrong = sorted(p for p, _ in counted.items() ^ self._owners.items())
                raise IntegrityError(f"counts differ from the owners' on pages {wrong[:8]}")

    def _counted(self, pages: Iterable[int], least: int | None = None) -> dict[int, int]:
        """How often each page is named; `PageError` for a page without that many owners."""
        counts: dict[int, int] = {}  # a Counter is slower to make than one page is to release
        for page in map(index, pages):
            counts[page] = counts.get(page, 0) + 1
        for page, times in counts.items():
            owners = self._owners.get(page, 0)
            if owners < (least or times):
                raise PageError(
                    f"page {page} has {owners} owners, {least or times} needed; "
                    f"pages 0 … {self.num_pages - 1} exist, and each owner may release once"
                )
        return counts
