"""A pool of another size under sequences and a cache that go on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from device import Device
from space_world import World, plan_of

from kvq_pools import (
    CacheSpace,
    PageError,
    Pool,
    PoolFailed,
    RebuildFailed,
    RebuildRejected,
    rebuild,
)

FAMILIES = ("mha", "hybrid_swa", "all_window", "qsa")


def busy(family: str, device: Device | None = None) -> World:
    """Two sequences that share a beginning, one twin, and what others left in the cache."""
    memory: dict[str, Any] = {} if device is None else {"empty": device.empty}
    plan = plan_of(family, 4, window=8, window_pages=24, max_requests=4)
    world = World(plan, 24, **memory)
    for begin in (100, 200, 300):
        world.close(world.run(list(range(begin, begin + 11)), step=4))
    first = world.run(list(range(18)), step=4)
    world.run([*range(12), *range(60, 67)], step=4)
    world.fork(first)
    world.check()
    return world


def state(world: World) -> object:
    """Everything that a failed rebuild must leave as it was."""
    space, tree = world.space, world.space._tree
    return (
        space.plan,
        space.num_pages,
        space.failed,
        [(str(s.tables), s.num_computed, len(s._path), s._loose) for s in space._sequences],
        {key: (list(n.pages), n.holders, n.used) for key, n in tree.nodes.items()},
        {tier: queue.in_order() for tier, queue in tree.let_go.items()},
        {tier: (list(a._owners), list(a._free)) for tier, a in space._allocators.items()},
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pages", [24, 60])
def test_a_larger_pool_keeps_everything(family: str, pages: int) -> None:
    world = busy(family)
    said = [world.live[s] for s in world.live]
    hits = [world.space.lookup([*range(b, b + 11), 1]) for b in (100, 200, 300)]
    done = world.rebuild(pages)
    world.check()
    assert not done.dropped and not any(done.cached_dropped.values())
    assert sum(done.cached_kept.values()) > 0
    assert [world.live[s] for s in world.live] == said
    after = [world.space.lookup([*range(b, b + 11), 1]) for b in (100, 200, 300)]
    assert (
        [h.num_tokens for h in after]
        == [h.num_tokens for h in hits]
        == [11 // world.pool.plan.granularity * world.pool.plan.granularity] * 3
    )
    for sequence in world.live:
        world.live[sequence] += range(900, 907)
        world.compute(sequence, 7)
    world.check()


def test_a_smaller_pool_keeps_running_sequences_in_the_order_given() -> None:
    for order, kept in (((0, 1, 2), [0, 1]), ((2, 1, 0), [2, 1]), ((1,), [1, 0])):
        world = busy("mha")
        running = list(world.live)  # 5 + 5 pages of which 3 are shared, and a twin's copy
        done = world.rebuild(7, running=[running[i] for i in order])
        assert [s for s in running if s not in done.dropped] == [running[i] for i in sorted(kept)]
        assert all(not any(s.tables.values()) for s in done.dropped)
        with pytest.raises(PageError, match="closed"):
            done.dropped[0].grow(1)
        world.check()


def test_cached_pages_stay_by_recency_with_their_parents() -> None:
    world = World(plan_of("mha", 4), 24)
    for begin in (100, 200, 300):
        world.close(world.run(list(range(begin, begin + 11))))
    world.close(world.open([*range(100, 111), 1]))  # used again
    done = world.rebuild(7)
    assert (done.cached_kept, done.cached_dropped) == ({"full": 7}, {"full": 2})
    hits = [world.space.lookup([*range(b, b + 11), 1]).num_tokens for b in (100, 200, 300)]
    assert hits == [11, 4, 11]
    world.check()


@pytest.mark.parametrize(("runs", "pages"), [(True, 2), (False, 3)])
def test_the_latest_window_pages_stay_those_of_who_is_dropped_among_them(
    runs: bool, pages: int
) -> None:
    """What was dropped is computed again soonest."""
    world = World(plan_of("all_window", 4, window=9), 16)
    world.close(world.run(list(range(100, 113)), step=4))
    running = world.run(list(range(13)), step=4)  # it has 3 pages
    if not runs:
        world.close(running)
    assert len(world.rebuild(pages).dropped) == runs
    hits = [world.space.lookup(list(range(b, b + 13))).num_tokens for b in (0, 100)]
    assert hits == [12, 0]
    world.check()


def test_a_page_that_sequences_share_is_kept_once() -> None:
    world = World(plan_of("mha", 4), 40)
    system = list(range(16))
    running = [world.run([*system, 50 + i]) for i in range(8)]
    done = world.rebuild(12, running=running)
    assert not done.dropped
    assert len({s.tables["full"][0] for s in running}) == 1
    world.check()


def test_f43_every_tier_has_its_new_size_or_none_has() -> None:
    """A pool that grows, then shrinks: rows beyond the old size in full, index and ring tiers."""
    small, large = (plan_of("qsa", 4, max_requests=n) for n in (2, 5))
    world = World(small, 4)
    first = world.run(list(range(8)))
    world.rebuild(20, plan=large)
    for tier in large.tiers:
        for slab in tier.slabs:
            planes = world.pool.view(slab.name, 0).planes.values()
            assert {len(plane) for plane in planes} == {tier.pages(20) + 1}
    more = [world.run([50 + i, *range(13)]) for i in range(4)]
    assert max(p for s in more for p in s.tables["full"]) >= 4
    assert {s.tables["ring"][0] for s in [first, *more]} == set(range(5))
    world.check()
    done = world.rebuild(4, plan=small, running=[first])
    assert len(done.dropped) == 4 and list(world.live) == [first]
    assert {len(p) for p in world.pool.view("index_k", 0).planes.values()} == {5}
    assert {len(p) for p in world.pool.view("index_pending", 0).planes.values()} == {3}
    world.live[first] += range(8, 16)
    world.compute(first, 8)
    world.check()


@pytest.mark.parametrize(
    "changes",
    [{"codec": "bf16"}, {"page_tokens": 8}, {"family": "mha"}, {"window": 9}],
    ids=str,
)
def test_another_layout_keeps_nothing(changes: dict[str, Any]) -> None:
    world = busy("hybrid_swa")
    running = list(world.live)
    arguments = {"family": "hybrid_swa", "page_tokens": 4, "window": 8, "window_pages": 24}
    done = world.rebuild(24, plan=plan_of(**{**arguments, **changes}))
    assert done.dropped == running and not any(done.cached_kept.values())
    world.check()
    assert all(world.space.lookup(list(range(b, b + 11))).num_tokens == 0 for b in (0, 100))
    assert all(world.space.num_free(t) == a.num_pages for t, a in world.space._allocators.items())
    world.close(world.run(list(range(18)), step=4))
    assert world.space.lookup(list(range(18))).num_tokens == 17
    world.check()


def test_a_hit_from_before_a_rebuild_is_refused() -> None:
    for plan in (None, plan_of("mha", 8)):
        world = busy("mha")
        hit = world.space.lookup(list(range(100, 111)))
        world.rebuild(24, plan=plan)
        with pytest.raises(PageError, match="look the tokens up again"):
            world.space.can_open(11, hit=hit)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_failure_at_any_step_leaves_pool_and_space_as_they_were(family: str) -> None:
    """Each allocation, write and copy to the host fails in turn; a second failure is final."""
    for plan in (None, plan_of(family, 4, codec="bf16", window=8, window_pages=24)):
        device, step, survived = Device(), 0, 0
        world = busy(family, device)
        before, cached = state(world), world.space.num_cached(world.space.plan.tiers[0].name)
        assert cached
        while True:
            device.steps.clear()
            device.fail_at = [step]
            try:
                world.rebuild(9, plan=plan)
            except (RebuildFailed, RebuildRejected):
                survived += 1
            else:
                break
            assert state(world) == before
            device.fail_at = ()
            world.check()
            step += 1
        device.fail_at = ()
        assert survived >= 4
        world.check()


def test_an_interrupt_leaves_them_as_they_were_too() -> None:
    device = Device()
    world = busy("mha", device)
    before = state(world)
    device.steps.clear()
    device.fail_at, device.error = [3], KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        world.rebuild(9)
    device.fail_at = ()
    assert state(world) == before
    world.check()


def test_a_pool_that_failed_for_good_says_so_everywhere() -> None:
    device = Device()
    world = busy("mha", device)
    sequence = next(iter(world.live))
    device.steps.clear()
    device.fail_at = range(3, 1000)
    with pytest.raises(PoolFailed):
        world.rebuild(9)
    device.fail_at = ()
    assert world.space.failed == world.pool.failed is not None
    for use in (
        world.space.open,
        sequence.fork,
        lambda: sequence.grow(30),
        lambda: sequence.advance(18),
        lambda: rebuild(world.pool, world.space, 9),
    ):
        with pytest.raises(PoolFailed, match="make a new pool"):
            use()
    sequence.close()  # to go is allowed


def test_what_does_not_belong_together_is_refused() -> None:
    plan = plan_of("mha", 4)
    pool, space = Pool(plan, 8), CacheSpace(plan, 8)
    sequence = space.open()
    for other in (CacheSpace(plan, 9), CacheSpace(plan_of("mha", 2), 8)):
        with pytest.raises(PageError, match="do not belong"):
            rebuild(pool, other, 4)
    with pytest.raises(PageError, match="another space"):
        rebuild(pool, space, 4, running=[CacheSpace(plan, 8).open()])
    sequence.close()
    with pytest.raises(PageError, match="closed"):
        rebuild(pool, space, 4, running=[sequence])
    for pages in (0, -1, 2.0, np.int64(4), None):
        with pytest.raises(RebuildRejected, match="num_pages"):
            rebuild(pool, space, pages)  # type: ignore[arg-type]
    assert (pool.num_pages, space.num_pages) == (8, 8)
