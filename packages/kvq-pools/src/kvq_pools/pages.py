"""Pages: who owns how many, and where a position lies."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import repeat
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

    Pages are handed out in order the first time, so `_owners[page]` counts the owners of those
    ever handed out; 0 = free again. Bookkeeping takes 12 bytes for each of those, not for each
    page of the pool; lists would take five times that, and wait for memory in large pools.
    """

    __slots__ = ("_free", "_owners", "num_pages")

    def __init__(self, num_pages: int) -> None:
        self.num_pages = whole_number("num_pages", num_pages, 1)
        self._free = array("q")
        self._owners = array("i")

    @property
    def num_free(self) -> int:
        """Pages that `alloc` can hand out."""
        return self.num_pages - len(self._owners) + len(self._free)

    def owners(self, page: int) -> int:
        """How many owners a page has; 0 when it is free or does not exist."""
        return self._owners[page] if 0 <= page < len(self._owners) else 0

    def alloc(self, count: int) -> list[int]:
        """`count` pages with one owner each, recently released ones first; `OutOfPages`."""
        free, owners = self._free, self._owners
        if count == 1 and type(count) is int and free:  # what a decode asks for
            page = free.pop()
            owners[page] = 1
            return [page]
        if whole_number("count", count) > self.num_free:
            raise OutOfPages(count, self.num_free, self.num_pages)
        keep = max(0, len(free) - count)
        pages = free[keep:].tolist()
        del free[keep:]
        for page in pages:
            owners[page] = 1
        fresh = count - len(pages)
        pages += range(len(owners), len(owners) + fresh)
        owners.extend(repeat(1, fresh))
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """One more owner for each page; `PageError` unless all of them are owned."""
        named = [index(page) for page in pages]
        for page in named:
            if not self.owners(page):
                raise self._too_few(page, 1)
        for page in named:
            self._owners[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One owner less for each page; the last one frees it. `PageError`: none is released."""
        owners, used = self._owners, len(self._owners)
        named = [index(page) for page in pages]
        freed = []
        for done, page in enumerate(named):
            left = owners[page] - 1 if 0 <= page < used else -1
            if left < 0:
                for earlier in named[:done]:
                    owners[earlier] += 1
                raise self._too_few(page, named.count(page))
            owners[page] = left
            if not left:
                freed.append(page)
        self._free.extend(freed)

    def check_integrity(self, owners: Iterable[Iterable[int]] | None = None) -> None:
        """Raise `IntegrityError` unless each page is unused, free or owned, exactly one of them.

        `owners`: the pages of each owner, when known; the counts must equal theirs.
        """
        used = len(self._owners)
        if type(self.num_pages) is not int or used > self.num_pages:
            raise IntegrityError(f"{used} of {self.num_pages!r} pages were handed out")
        if min(self._owners, default=0) < 0:
            raise IntegrityError("a page has a negative count of owners")
        free, unowned = Counter(self._free), [p for p, n in enumerate(self._owners) if not n]
        if free != Counter(unowned):
            wrong = sorted({page for page, _ in free.items() ^ Counter(unowned).items()})
            raise IntegrityError(f"pages free twice, free and owned, or neither: {wrong[:8]}")
        if owners is not None:
            counted = Counter(page for owner in owners for page in owner)
            held = {page: count for page, count in enumerate(self._owners) if count}
            if counted != held:
                wrong = sorted({page for page, _ in counted.items() ^ held.items()})
                raise IntegrityError(f"counts differ from the owners' on pages {wrong[:8]}")

    def _too_few(self, page: int, needed: int) -> PageError:
        return PageError(
            f"page {page} has {self.owners(page)} owners, {needed} needed; "
            f"pages 0 … {self.num_pages - 1} exist, and each owner may release once"
        )
