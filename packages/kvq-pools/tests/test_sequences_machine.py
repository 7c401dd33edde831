"""Sequences in all tiers against a model that asks, position by position, who can see what."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pool_cases import tiny_hybrid

from kvq_pools import CacheSpace, OutOfPages, PageError, SequencePages


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
        self.plan = tiny_hybrid(window, page_tokens, window_pages)
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
