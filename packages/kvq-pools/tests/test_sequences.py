"""Sequences in all tiers: starving, admission, refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_cases import tiny_all_window, tiny_full, tiny_hybrid

from kvq_pools import (
    CacheSpace,
    IntegrityError,
    OutOfPages,
    PageAllocator,
    PageError,
    PoolPlan,
    SequencePages,
    window_pages_per_request,
)


@settings(max_examples=60, deadline=None)
@given(
    requests=st.integers(1, 4),
    window=st.integers(1, 20),
    max_step=st.integers(1, 24),
    page_tokens=st.sampled_from([1, 3, 4, 16]),
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 24)), max_size=60),
)
def test_a_window_tier_of_the_floor_never_starves_a_running_request(
    requests: int, window: int, max_step: int, page_tokens: int, steps: list[tuple[int, int]]
) -> None:
    floor = window_pages_per_request(window, max_step, page_tokens)
    space = CacheSpace(tiny_hybrid(window, page_tokens, requests * floor), 10_000)
    running = [space.open() for _ in range(requests)]
    for who, count in steps:
        sequence = running[who % requests]
        goal = sequence.num_computed + min(count, max_step)
        sequence.grow(goal)
        # every query of this step finds all that it sees
        for query in range(sequence.num_computed, goal):
            first = max(0, query - window + 1)
            assert len(sequence.slots("window", first, query + 1)) == query + 1 - first
        sequence.advance(goal)
    space.check_integrity()


@given(
    plan=st.one_of(
        st.builds(tiny_hybrid, st.integers(1, 12), st.sampled_from([1, 3, 4]), st.integers(1, 9)),
        st.builds(tiny_all_window, st.integers(1, 12), st.sampled_from([1, 3, 4])),
        st.builds(tiny_full, st.sampled_from([1, 3, 4])),
    ),
    pages=st.integers(1, 12),
    taken=st.integers(0, 12),
    tokens=st.integers(0, 40),
    step=st.integers(1, 10),
)
def test_what_can_be_opened_reaches_its_length(
    plan: PoolPlan, pages: int, taken: int, tokens: int, step: int
) -> None:
    def reaches(space: CacheSpace, step: int) -> bool:
        sequence = space.open()
        try:
            for computed in range(0, tokens, step):
                sequence.grow(min(tokens, computed + step))
                sequence.advance(sequence.num_tokens)
        except OutOfPages:
            return False
        finally:
            sequence.close()
        return True

    space = CacheSpace(plan, pages)
    assert space.can_open(tokens) == space.fits(tokens) == reaches(space, 1)
    assert reaches(space, step) or not space.fits(tokens, step)
    other = space.open()
    if space.can_grow(other, taken):
        other.grow(taken)
    assert space.can_open(tokens) == reaches(space, 1)
    assert reaches(space, step) or not space.can_open(tokens, step)
    assert space.fits(tokens) or not space.can_open(tokens)


def test_admission_counts_whole_pages() -> None:
    """Two requests of two tokens and one page of 128: the second has to wait."""
    space = CacheSpace(tiny_full(128), 1)
    first = space.open()
    first.grow(2)
    assert space.fits(2)
    assert not space.can_open(2)
    assert space.can_grow(first, 128)
    first.close()
    assert space.can_open(2)


def test_one_tier_without_room_leaves_all_tiers_as_they_were() -> None:
    space = CacheSpace(tiny_hybrid(4, 4, 2), 8)
    sequence = space.open()
    sequence.grow(8)
    with pytest.raises(
        OutOfPages, match="1 pages needed in tier 'window' to grow from 8 to 12 tokens, 0 of 2 free"
    ):
        sequence.grow(12)
    assert (space.num_free("full"), space.num_free("window")) == (6, 0)
    assert sequence.num_tokens == 8
    sequence.advance(8)
    sequence.grow(12)
    assert sequence.tables["window"][0] == -1


def test_slots_of_what_the_window_left_are_refused() -> None:
    space = CacheSpace(tiny_hybrid(4, 4, 3), 8)
    sequence = space.open()
    sequence.grow(9)
    sequence.advance(7)
    assert len(sequence.slots("window", 4, 9)) == 5
    assert len(sequence.slots("full", 0, 9)) == 9
    with pytest.raises(PageError, match="position 3 has no page"):
        sequence.slots("window", 3, 9)
    with pytest.raises(KeyError):
        sequence.slots("ring", 0, 1)
    with pytest.raises(KeyError, match="ring"):
        space.num_free("ring")


def test_a_sequence_of_another_space_is_refused() -> None:
    mine, theirs = CacheSpace(tiny_full(4), 4), CacheSpace(tiny_full(4), 4)
    with pytest.raises(PageError, match="another space"):
        mine.can_grow(theirs.open(), 4)


@pytest.mark.parametrize("bad", [-1, 2.0, None])
def test_counts_of_the_wrong_kind(bad: int) -> None:
    space = CacheSpace(tiny_full(4), 4)
    sequence = space.open()
    for use in (
        lambda: sequence.grow(bad),
        lambda: sequence.advance(bad),
        lambda: sequence.slots("full", bad, 2),
        lambda: space.fits(bad),
        lambda: space.can_open(bad),
        lambda: space.can_grow(sequence, bad),
        lambda: CacheSpace(tiny_full(4), bad),
    ):
        with pytest.raises(PageError, match="must be an int"):
            use()


DAMAGE: dict[str, Callable[[CacheSpace, SequencePages, SequencePages], object]] = {
    "lost page": lambda space, a, b: a.tables["full"].pop(),
    "stolen page": lambda space, a, b: a.tables["full"].__setitem__(0, b.tables["full"][0]),
    "early release": lambda space, a, b: a.tables["window"].__setitem__(1, -1),
    "late release": lambda space, a, b: a.tables["window"].__setitem__(0, 3),
    "release not noted": lambda space, a, b: a._kept_from.update(window=0),
    "release noted early": lambda space, a, b: a._kept_from.update(window=2),
    "release of what never is": lambda space, a, b: a._kept_from.update(full=1),
    "release of an unknown tier": lambda space, a, b: a._kept_from.update(ring=0),
    "no release of a tier": lambda space, a, b: a._kept_from.pop("full"),
    "no table of a tier": lambda space, a, b: a.tables.pop("full"),
    "table of an unknown tier": lambda space, a, b: a.tables.update(ring=[]),
    "page that is no int": lambda space, a, b: a.tables["full"].append(
        float(a.tables["full"].pop())
    ),
    "released page that is no int": lambda space, a, b: a.tables["window"].__setitem__(0, -1.0),
    "negative count": lambda space, a, b: setattr(a, "num_computed", -5),
    "computed beyond its tokens": lambda space, a, b: setattr(b, "num_computed", 5),
    "fewer tokens than pages": lambda space, a, b: setattr(b, "num_tokens", 0),
    "count that is no int": lambda space, a, b: setattr(a, "num_computed", 9.0),
    "tokens that are no int": lambda space, a, b: setattr(a, "num_tokens", None),
    "another size of the space": lambda space, a, b: setattr(space, "num_pages", 9),
    "another size of an allocator": lambda space, a, b: space._allocators.update(
        window=PageAllocator(5)
    ),
    "no allocator of a tier": lambda space, a, b: space._allocators.pop("window"),
    "forgotten sequence": lambda space, a, b: space._sequences.pop(b),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_check_integrity_finds_each_kind_of_damage(damage: str) -> None:
    space = CacheSpace(tiny_hybrid(4, 4, 4), 8)
    sequence, other = space.open(), space.open()
    sequence.grow(10)
    sequence.advance(9)
    other.grow(4)
    space.check_integrity()
    DAMAGE[damage](space, sequence, other)
    with pytest.raises(IntegrityError):
        space.check_integrity()
