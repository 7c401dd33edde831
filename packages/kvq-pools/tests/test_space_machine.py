"""Sequences, forks, the prefix cache and rebuilds against memory that knows who wrote it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from space_world import World, plan_of

from kvq_pools import OutOfPages, PageError, RebuildFailed, RebuildRejected, SequencePages

FAMILIES = ("mha", "hybrid_swa", "all_window", "qsa")
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)


class Space(RuleBasedStateMachine):
    """Few tokens, so that much is shared; few pages, so that much is evicted."""

    steps = 0

    @initialize(
        family=st.sampled_from(FAMILIES),
        page_tokens=st.sampled_from([2, 4, 6]),
        window=st.integers(1, 9),
        window_pages=st.integers(2, 9),
        pages=st.integers(2, 14),
        max_requests=st.integers(1, 4),
        copy=st.booleans(),
    )
    def start(
        self,
        family: str,
        page_tokens: int,
        window: int,
        window_pages: int,
        pages: int,
        max_requests: int,
        copy: bool,
    ) -> None:
        self.family = family
        self.sizes = {"window": window, "window_pages": window_pages, "max_requests": max_requests}
        self.allocations_left = 10**9
        plan = plan_of(family, page_tokens, **self.sizes)
        self.world = World(plan, pages, copy=copy, empty=self.empty)
        self.said: list[list[int]] = [[]]  # token lists to continue
        self.calm = 0  # operations since the last upheaval

    def empty(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        self.allocations_left -= 1
        if self.allocations_left == 0:
            raise MemoryError("as told")
        return np.full(shape, 7, dtype)

    def pick(self, data: st.DataObject) -> SequencePages:
        return data.draw(st.sampled_from(list(self.world.live)))

    @rule(
        data=st.data(),
        cut=st.integers(0, 4),
        more=TOKENS,
        adapter=st.sampled_from(["", "", "", "a"]),
        step=st.integers(0, 9),
        ends=st.booleans(),
    )
    def serve(
        self, data: st.DataObject, cut: int, more: list[int], adapter: str, step: int, ends: bool
    ) -> None:
        """Ask again for what was said before, shortened and continued; compute and end it."""
        self.calm += 1
        if len(self.world.live) >= 5:
            return
        old = data.draw(st.sampled_from(self.said[-8:]))
        tokens = [*old[: max(0, len(old) - cut)], *more][-60:]
        hit = self.world.space.lookup(tokens, adapter)
        grain = self.world.pool.plan.granularity
        assert hit.num_tokens < len(tokens) and hit.num_tokens % grain == 0
        possible = self.world.space.can_open(len(tokens), len(tokens), hit)
        free = {t: self.world.space.num_free(t) for t in self.world.space._allocators}
        sequence = self.world.open(tokens, adapter)
        assert sequence.num_computed == sequence.num_cached == hit.num_tokens
        assert self.world.space.can_grow(sequence, len(tokens)) >= possible
        assert all(self.world.space.num_free(t) <= free[t] for t in free)
        self.said.append(tokens)
        while step and sequence.num_computed < len(tokens):
            goal = min(len(tokens), sequence.num_computed + step)
            if not self.world.space.can_grow(sequence, goal):
                break
            self.world.compute(sequence, goal - sequence.num_computed)
        if ends:
            self.world.close(sequence)

    @precondition(lambda self: self.world.live)
    @rule(
        data=st.data(),
        count=st.integers(1, 12),
        step=st.integers(1, 12),
        told=st.sampled_from([True, True, True, False]),
    )
    def compute(self, data: st.DataObject, count: int, step: int, told: bool) -> None:
        """What can be grown at once can be reached in steps as well."""
        self.calm += 1
        sequence = self.pick(data)
        tokens = self.world.live[sequence]
        while len(tokens) < sequence.num_computed + count:
            tokens.append(data.draw(st.integers(0, 1)))
        self.said.append(list(tokens))
        goal = sequence.num_computed + count
        before = str(sequence.tables)
        if self.world.space.can_grow(sequence, goal):
            while sequence.num_computed < goal:
                self.world.compute(sequence, min(step, goal - sequence.num_computed), told=told)
        else:
            with pytest.raises(OutOfPages):
                sequence.grow(goal)
            assert str(sequence.tables) == before

    @rule(
        data=st.data(),
        cut=st.integers(0, 30),
        more=TOKENS,
        step=st.integers(1, 9),
        told=st.sampled_from([True, True, True, False]),
    )
    def keep_promises(
        self, data: st.DataObject, cut: int, more: list[int], step: int, told: bool
    ) -> None:
        """What `can_open` promises is reached, by all it was promised to, whoever goes first."""
        self.calm += 1
        space, live = self.world.space, list(self.world.live)
        goals: dict[SequencePages, int] = {}
        for sequence in data.draw(st.permutations(live))[: data.draw(st.integers(0, 2))]:
            goals[sequence] = sequence.num_computed + data.draw(st.integers(0, 12))
            tokens = self.world.live[sequence]
            while len(tokens) < goals[sequence]:
                tokens.append(data.draw(st.integers(0, 1)))
        tokens = list(data.draw(st.sampled_from(self.said[-8:])) or more)
        prompt = tokens[: max(1, len(tokens) - cut)]
        hit, promised = space.lookup(prompt), list(goals.items())

        def possible(length: int) -> bool:
            return space.can_open(length, step, hit, promised=promised)

        if len(live) >= 5 or not possible(len(prompt)):
            return
        most = len(prompt)
        while most < len(prompt) + 40 and possible(most + 1):
            most += 1
        tokens = [*tokens, *more * most][:most]
        newest = self.world.open(prompt)
        self.world.live[newest] = tokens
        goals[newest] = len(tokens)
        self.said.append(tokens)
        while late := [s for s, goal in goals.items() if s.num_computed < goal]:
            sequence = data.draw(st.sampled_from(late))
            count = min(step, goals[sequence] - sequence.num_computed)
            self.world.compute(sequence, count, told=told)

    @precondition(lambda self: self.world.live)
    @rule(data=st.data(), more=st.integers(0, 9))
    def grow_ahead(self, data: st.DataObject, more: int) -> None:
        """Pages without computed tokens hold nothing, and must never be found."""
        sequence = self.pick(data)
        if self.world.space.can_grow(sequence, sequence.num_tokens + more):
            sequence.grow(sequence.num_tokens + more)

    @precondition(lambda self: self.world.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        before, live = str(sequence.tables), len(self.world.live)
        try:
            twin = self.world.fork(sequence)
        except OutOfPages:
            assert len(self.world.space._sequences) == live
        except PageError:
            assert self.world.space.copy_page is None
            assert len(self.world.space._sequences) == live
        else:
            assert twin.num_computed == twin.num_tokens == sequence.num_computed
        assert str(sequence.tables) == before

    @precondition(lambda self: self.world.live)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.world.close(self.pick(data))

    @precondition(lambda self: self.calm >= 3)
    @rule(then=st.sampled_from(["go on", "go on", "drop the cache", "rebuild to nothing"]))
    def press(self, then: str) -> None:
        """Somebody takes all that can be had, tells nobody what for, and goes."""
        self.calm = 0
        space = self.world.space
        greedy = space.open()
        while greedy.num_tokens < 200 and space.can_grow(greedy, greedy.num_tokens + 1):
            greedy.grow(greedy.num_tokens + 1)
        self.world.check()
        greedy.close()
        if then == "drop the cache":
            space.drop_cached()
            assert not any(space.num_cached(tier) for tier in space._allocators)
        elif then == "rebuild to nothing":
            with pytest.raises(RebuildRejected):
                self.world.rebuild(0)

    @precondition(lambda self: self.calm >= 3)
    @rule(data=st.data(), pages=st.integers(1, 16), fail_at=st.sampled_from([None, 1, 2, 3]))
    def rebuild(self, data: st.DataObject, pages: int, fail_at: int | None) -> None:
        self.calm = 0
        space, live = self.world.space, list(self.world.live)
        order = data.draw(st.permutations(live))
        named = order[: data.draw(st.integers(0, len(order)))]
        if fail_at is not None:
            self.allocations_left = fail_at
            tables = [str(sequence.tables) for sequence in live]
            hits = [space.lookup(tokens) for tokens in self.said]
            try:
                self.world.rebuild(pages, running=named)
            except RebuildFailed:
                assert [str(sequence.tables) for sequence in live] == tables
                assert [space.lookup(tokens) for tokens in self.said] == hits
            finally:
                self.allocations_left = 10**9
            return
        cached = {tier: space.num_cached(tier) for tier in space._tree.tiers}
        room = {tier: space._allocators[tier].num_pages for tier in space._allocators}
        done = self.world.rebuild(pages, running=named)
        for tier, before in cached.items():
            assert done.cached_kept[tier] == space.num_cached(tier)
            assert done.cached_kept[tier] + done.cached_dropped[tier] == before
        if all(a.num_pages >= room[tier] for tier, a in space._allocators.items()):
            assert not done.dropped and not any(done.cached_dropped.values())

    @precondition(lambda self: self.calm >= 6)
    @rule(
        pages=st.integers(1, 12),
        page_tokens=st.sampled_from([2, 4]),
        codec=st.sampled_from(["fp32", "bf16"]),
        more_requests=st.integers(0, 2),
    )
    def rebuild_to_another_plan(
        self, pages: int, page_tokens: int, codec: str, more_requests: int
    ) -> None:
        self.calm = 0
        space = self.world.space
        sizes = {**self.sizes, "max_requests": self.sizes["max_requests"] + more_requests}
        plan = plan_of(self.family, page_tokens, codec=codec, **sizes)
        same = (
            plan.page_tokens == space.plan.page_tokens
            and plan.tiers[0].slabs == space.plan.tiers[0].slabs
        )
        live = len(self.world.live)
        done = self.world.rebuild(pages, plan=plan)
        if not same:
            assert len(done.dropped) == live
            assert not any(space.num_cached(tier) for tier in space._tree.tiers)

    @invariant()
    def all_read_their_own(self) -> None:
        Space.steps += 1
        if hasattr(self, "world"):
            self.world.check()
            space = self.world.space
            for tier, allocator in space._allocators.items():
                used = {p for s in self.world.live for p in s.tables[tier] if p != -1}
                assert space.num_free(tier) <= allocator.num_pages - len(used)
                if not self.world.live:
                    assert space.num_free(tier) == allocator.num_pages


TestSpace = Space.TestCase
TestSpace.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.mark.slow
def test_a_hundred_thousand_steps() -> None:
    before = Space.steps
    run_state_machine_as_test(
        Space, settings=settings(max_examples=3200, stateful_step_count=50, deadline=None)
    )
    assert Space.steps - before >= 100_000
