"""The allocator against a plain Counter, and the arithmetic of slots."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvq_pools import IntegrityError, OutOfPages, PageAllocator, PageError, pages_for_tokens, slots


class Allocation(RuleBasedStateMachine):
    """Owners hold lists of pages; whatever is done, the counts are theirs."""

    @initialize(num_pages=st.integers(1, 12))
    def start(self, num_pages: int) -> None:
        self.allocator = PageAllocator(num_pages)
        self.owners: list[list[int]] = []

    def counts(self) -> Counter[int]:
        return Counter(page for owner in self.owners for page in owner)

    @rule(count=st.integers(0, 8))
    def alloc(self, count: int) -> None:
        before = self.counts()
        free = self.allocator.num_pages - len(before)
        if count > free:
            with pytest.raises(OutOfPages, match=rf"^{count} pages needed, {free} of ") as caught:
                self.allocator.alloc(count)
            assert (caught.value.needed, caught.value.free) == (count, free)
            return
        pages = self.allocator.alloc(count)
        assert len(set(pages)) == len(pages) == count
        assert all(0 <= p < self.allocator.num_pages and p not in before for p in pages)
        self.owners.append(pages)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        if self.owners:
            pages = data.draw(st.sampled_from(self.owners))
            self.allocator.retain(pages)
            self.owners.append(list(pages))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.owners:
            which = data.draw(st.integers(0, len(self.owners) - 1))
            self.allocator.release(self.owners.pop(which))

    @rule(data=st.data())
    def merge_and_release_part(self, data: st.DataObject) -> None:
        """A page may be named as often as it has owners."""
        if len(self.owners) >= 2:
            pages = self.owners.pop() + self.owners.pop()
            cut = data.draw(st.integers(0, len(pages)))
            self.allocator.release(pages[:cut])
            self.owners.append(pages[cut:])

    @rule(page=st.integers(-2, 14))
    def release_once_too_often(self, page: int) -> None:
        held = list(self.counts())
        extra = [page] * (self.counts()[page] + 1)
        with pytest.raises(PageError, match=rf"page {page} has"):
            self.allocator.release(held + extra)
        if not self.counts()[page]:
            with pytest.raises(PageError, match=rf"page {page} has 0 owners"):
                self.allocator.retain([*held, page])

    @invariant()
    def accounts_are_right(self) -> None:
        if hasattr(self, "allocator"):
            self.allocator.check_integrity(self.owners)
            assert self.allocator.num_free == self.allocator.num_pages - len(self.counts())


TestAllocation = Allocation.TestCase
TestAllocation.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_every_page_is_handed_out_once_before_none_is_left() -> None:
    allocator = PageAllocator(1000)
    assert sorted(allocator.alloc(400) + allocator.alloc(600)) == list(range(1000))
    with pytest.raises(OutOfPages, match="1 pages needed, 0 of 1000 free"):
        allocator.alloc(1)


def test_page_ids_come_back_as_ints_whatever_type_named_them() -> None:
    allocator = PageAllocator(4)
    allocator.release(np.asarray(allocator.alloc(4), np.int32))
    assert all(type(page) is int for page in allocator.alloc(4))


@pytest.mark.parametrize("bad", [-1, 1.0, None])
def test_counts_of_the_wrong_kind(bad: int) -> None:
    with pytest.raises(PageError, match="count"):
        PageAllocator(4).alloc(bad)
    with pytest.raises(PageError, match="num_pages"):
        PageAllocator(bad)
    with pytest.raises(PageError, match="tokens"):
        pages_for_tokens(bad, 16)
    with pytest.raises(PageError, match="page_tokens"):
        pages_for_tokens(1, bad)


def test_check_integrity_finds_each_kind_of_damage() -> None:
    def damaged() -> PageAllocator:
        allocator = PageAllocator(8)
        pages = allocator.alloc(4)
        allocator.release(pages[:2])
        allocator.check_integrity([pages[2:]])
        return allocator

    for break_it in (
        lambda a: a._free.append(a._free[0]),  # free twice
        lambda a: a._free.append(3),  # free and owned
        lambda a: a._free.append(7),  # free, never handed out
        lambda a: a._free.pop(),  # leaked
        lambda a: a._owners.extend([0, 0, 1]),  # handed out, neither free nor owned
        lambda a: a._owners.__setitem__(3, 0),  # owned by nobody
        lambda a: a._owners.__setitem__(3, -1),
        lambda a: a._owners.__setitem__(0, 1),  # owned, yet free
        lambda a: setattr(a, "num_pages", 8.0),
        lambda a: setattr(a, "num_pages", 3),
    ):
        allocator = damaged()
        break_it(allocator)
        with pytest.raises(IntegrityError):
            allocator.check_integrity()
    for owners in ([[2]], [[2, 3], [3]], [[2, 3, 0]]):
        with pytest.raises(IntegrityError, match="owners'"):
            damaged().check_integrity(owners)


@given(
    table=st.lists(st.integers(0, 2**31 - 2), min_size=1, max_size=9),
    page_tokens=st.sampled_from([1, 3, 16, 128]),
    data=st.data(),
)
def test_slots_are_page_times_page_tokens_plus_offset(
    table: list[int], page_tokens: int, data: st.DataObject
) -> None:
    stop = data.draw(st.integers(0, len(table) * page_tokens))
    start = data.draw(st.integers(0, stop))
    wanted = [table[p // page_tokens] * page_tokens + p % page_tokens for p in range(start, stop)]
    for given_as in (table, np.asarray(table, np.int32)):  # int32 times page_tokens would wrap
        got = slots(given_as, start, stop, page_tokens)
        assert got.dtype == np.int64
        assert got.tolist() == wanted


def test_slots_of_released_or_missing_pages_are_refused() -> None:
    table = [-1, -1, 5, 9]
    assert slots(table, 32, 48, 16).tolist() == list(range(80, 96))
    with pytest.raises(PageError, match="position 31 has no page"):
        slots(table, 31, 34, 16)
    with pytest.raises(PageError, match="beyond the 64"):
        slots(table, 60, 65, 16)
    for start, stop in ((-1, 4), (5, 4)):
        with pytest.raises(PageError, match="must be an int of at least"):
            slots(table, start, stop, 16)


@pytest.mark.parametrize("page", [1.5, 2.0, None, "3", 2**62, 2**63 // 16, 2**63, 2**64, 2**70])
def test_slots_of_what_is_no_page_are_refused(page: Any) -> None:
    for table in ([page], [0, page], [page, 0]):
        with pytest.raises(PageError, match="pages must be integers of at most 576460752303423487"):
            slots(table, 0, 16 * len(table), 16)


@pytest.mark.parametrize("page_tokens", [1, 16, 24])
def test_the_largest_page_has_slots(page_tokens: int) -> None:
    page = 2**63 // page_tokens - 1
    wanted = [page * page_tokens + offset for offset in range(page_tokens)]
    assert slots([page], 0, page_tokens, page_tokens).tolist() == wanted
    with pytest.raises(PageError, match="at most"):
        slots([page + 1], 0, page_tokens, page_tokens)


@given(tokens=st.integers(0, 2**40), page_tokens=st.integers(1, 300))
def test_pages_are_whole(tokens: int, page_tokens: int) -> None:
    pages = pages_for_tokens(tokens, page_tokens)
    assert (pages - 1) * page_tokens < tokens <= pages * page_tokens
