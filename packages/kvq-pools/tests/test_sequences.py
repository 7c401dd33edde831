"""Sequences in all tiers against a model that asks, position by position, who can see what."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pool_cases import spec

from kvq_pools import (
    CacheSpace,
    IntegrityError,
    OutOfPages,
    PageError,
    PoolPlan,
    SequencePages,
    hybrid_swa,
    mha,
    window_pages_per_request,
)


def hybrid(window: int, page_tokens: int, window_pages: int) -> PoolPlan:
    s = spec("q8_0")
    return hybrid_swa(
        full_layers=(0,),
        window_layers=(1,),
        window=window,
        kv_heads=1,
        head_dim=32,
        k=s,
        v=s,
        page_tokens=page_tokens,
        window_pages=window_pages,
    )


def all_window(window: int, page_tokens: int) -> PoolPlan:
    s = spec("q8_0")
    return hybrid_swa(
        full_layers=(),
        window_layers=(0,),
        window=window,
        kv_heads=1,
        head_dim=32,
        k=s,
        v=s,
        page_tokens=page_tokens,
    )


def full(page_tokens: int) -> PoolPlan:
    s = spec("q8_0")
    return mha(layers=(0,), kv_heads=1, head_dim=32, k=s, v=s, page_tokens=page_tokens)


def needed(computed: int, tokens: int, window: int | None, page_tokens: int) -> set[int]:
    """Indices of the pages for [0, tokens) that a query at `computed` or later can see.

    The last page's empty places count: a later token goes there and sees itself.
    """
    room = -(-tokens // page_tokens) * page_tokens
    seen: set[int] = set()
    for query in range(computed, room + 1):
        first = 0 if window is None else query - window + 1
        seen.update(p // page_tokens for p in range(max(0, first), min(query + 1, room)))
    return seen


class Space(RuleBasedStateMachine):
    """Sequences grow, advance and end in a pool too small for all of them."""

    @initialize(
        window=st.integers(1, 14),
        page_tokens=st.sampled_from([1, 2, 3, 4, 8]),
        pages=st.integers(1, 14),
        window_pages=st.integers(1, 10),
    )
    def start(self, window: int, page_tokens: int, pages: int, window_pages: int) -> None:
        self.plan = hybrid(window, page_tokens, window_pages)
        self.totals = {"full": pages, "window": window_pages}
        self.space = CacheSpace(self.plan, pages)
        self.live: list[SequencePages] = []
        self.tokens: dict[SequencePages, tuple[int, int]] = {}  # computed, with pages

    def held(self, sequence: SequencePages, tier: str) -> set[int]:
        computed, tokens = self.tokens[sequence]
        return needed(computed, tokens, self.plan.tier(tier).window, self.plan.page_tokens)

    @rule()
    def open(self) -> None:
        sequence = self.space.open()
        self.live.append(sequence)
        self.tokens[sequence] = (0, 0)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), more=st.integers(-3, 20))
    def grow(self, data: st.DataObject, more: int) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        computed, tokens = self.tokens[sequence]
        goal = max(0, tokens + more)
        pages, before = -(-goal // self.plan.page_tokens), str(sequence.tables)
        free = {
            tier: self.totals[tier] - sum(len(self.held(s, tier)) for s in self.live)
            for tier in self.totals
        }
        short = [t for t in free if pages - len(sequence.tables[t]) > free[t]]
        assert self.space.can_grow(sequence, goal) == (not short)
        if short:
            with pytest.raises(OutOfPages, match=rf"in tier '{short[0]}'") as caught:
                sequence.grow(goal)
            assert caught.value.free == free[short[0]] < caught.value.needed
            assert str(sequence.tables) == before
        else:
            sequence.grow(goal)
            self.tokens[sequence] = (computed, max(tokens, goal))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def advance(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        computed, tokens = self.tokens[sequence]
        goal = data.draw(st.integers(computed, tokens))
        sequence.advance(goal)
        self.tokens[sequence] = (goal, tokens)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def advance_where_no_token_is(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        computed, tokens = self.tokens[sequence]
        for goal in (computed - 1, tokens + 1):
            with pytest.raises(PageError, match="num_computed"):
                sequence.advance(goal)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        self.live.remove(sequence)
        sequence.close()
        sequence.close()
        for use in (lambda: sequence.grow(1), lambda: sequence.advance(0)):
            with pytest.raises(PageError, match="closed"):
                use()
        with pytest.raises(PageError, match="closed"):
            self.space.can_grow(sequence, 1)

    @invariant()
    def tables_hold_what_can_be_seen_and_nothing_else(self) -> None:
        if not hasattr(self, "space"):
            return
        self.space.check_integrity()
        for tier, total in self.totals.items():
            owned: Counter[int] = Counter()
            for sequence in self.live:
                table = sequence.tables[tier]
                assert len(table) == -(-self.tokens[sequence][1] // self.plan.page_tokens)
                assert {i for i, p in enumerate(table) if p != -1} == self.held(sequence, tier)
                owned.update(p for p in table if p != -1)
            assert all(0 <= p < total and n == 1 for p, n in owned.items())
            assert self.space.num_free(tier) == total - len(owned)


TestSpace = Space.TestCase
TestSpace.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


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
    space = CacheSpace(hybrid(window, page_tokens, requests * floor), 10_000)
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
        st.builds(hybrid, st.integers(1, 12), st.sampled_from([1, 3, 4]), st.integers(1, 9)),
        st.builds(all_window, st.integers(1, 12), st.sampled_from([1, 3, 4])),
        st.builds(full, st.sampled_from([1, 3, 4])),
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
    space = CacheSpace(full(128), 1)
    first = space.open()
    first.grow(2)
    assert space.fits(2)
    assert not space.can_open(2)
    assert space.can_grow(first, 128)
    first.close()
    assert space.can_open(2)


def test_one_tier_without_room_leaves_all_tiers_as_they_were() -> None:
    space = CacheSpace(hybrid(4, 4, 2), 8)
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
    space = CacheSpace(hybrid(4, 4, 3), 8)
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
    mine, theirs = CacheSpace(full(4), 4), CacheSpace(full(4), 4)
    with pytest.raises(PageError, match="another space"):
        mine.can_grow(theirs.open(), 4)


@pytest.mark.parametrize("bad", [-1, 2.0, None])
def test_counts_of_the_wrong_kind(bad: int) -> None:
    space = CacheSpace(full(4), 4)
    sequence = space.open()
    for use in (
        lambda: sequence.grow(bad),
        lambda: sequence.advance(bad),
        lambda: sequence.slots("full", bad, 2),
        lambda: space.fits(bad),
        lambda: space.can_open(bad),
        lambda: space.can_grow(sequence, bad),
        lambda: CacheSpace(full(4), bad),
    ):
        with pytest.raises(PageError, match="must be an int"):
            use()


def test_check_integrity_finds_each_kind_of_damage() -> None:
    def broken(damage: str) -> CacheSpace:
        space = CacheSpace(hybrid(4, 4, 4), 8)
        sequence, other = space.open(), space.open()
        sequence.grow(10)
        sequence.advance(9)
        other.grow(4)
        space.check_integrity()
        if damage == "lost page":
            sequence.tables["full"].pop()
        elif damage == "stolen page":
            sequence.tables["full"][0] = other.tables["full"][0]
        elif damage == "early release":
            sequence.tables["window"][1] = -1
        elif damage == "late release":
            sequence.tables["window"][0] = 3
        elif damage == "forgotten sequence":
            space._sequences.remove(other)
        return space

    for damage in (
        "lost page",
        "stolen page",
        "early release",
        "late release",
        "forgotten sequence",
    ):
        with pytest.raises(IntegrityError):
            broken(damage).check_integrity()
