"""Who may have pages: admission, forks, eviction, and what integrity means."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_cases import tiny_full
from space_world import World, plan_of

from kvq_pools import (
    CacheSpace,
    IntegrityError,
    OutOfPages,
    PageAllocator,
    PageError,
    SequencePages,
)
from kvq_pools.nodes import Node, Root

FAMILIES = ("mha", "hybrid_swa", "all_window", "qsa")


def test_f31_a_page_is_whole_for_each_request() -> None:
    """Admission: page 128, one free page, two requests of 2 tokens; the second has to wait."""
    space = CacheSpace(tiny_full(128), 1, prefix_cache=True)
    assert space.can_open(2)
    first = space.open([1, 2])
    assert not space.can_open(2, promised=[(first, 2)])
    first.grow(2)
    assert not space.can_open(2)
    assert not space.can_open(2, hit=space.lookup([3, 4]))
    first.advance(2, [1, 2])
    first.close()  # its page is cached, for nobody
    assert space.num_free("full") == space.num_cached("full") == 1
    assert space.can_open(2, hit=space.lookup([3, 4]))


def test_f31_promises_are_rounded_one_by_one() -> None:
    """Three requests of 2 tokens need three pages of 128, not one."""
    space = CacheSpace(tiny_full(128), 3)
    running = [space.open(), space.open()]
    promised = [(sequence, 2) for sequence in running]
    assert space.can_open(2, promised=promised)
    third = space.open()
    assert not space.can_open(2, promised=[*promised, (third, 2)])
    assert not space.can_open(129, promised=promised)
    other = CacheSpace(tiny_full(128), 3)
    with pytest.raises(PageError, match="another space"):
        other.can_open(2, promised=promised)


def test_window_pages_that_twins_share_come_back_to_neither() -> None:
    """Each of two needs 3 pages on its way, whatever the other gives up."""
    world = World(plan_of("all_window", 2, window=4), 5)
    first = world.run(list(range(8)))
    running = [first, world.fork(first)]
    assert world.space.num_free("window") == 3
    promised = [(sequence, 16) for sequence in running]
    assert not world.space.can_open(2, 2, promised=promised)
    assert not world.space.can_open(0, 2, promised=promised)
    world.close(running.pop())
    assert world.space.can_open(4, 2, promised=[(first, 16)])
    assert not world.space.can_open(5, 2, promised=[(first, 16)])


def test_pages_of_the_hit_itself_are_not_free() -> None:
    """Four pages, all cached: a hit of two leaves two for the rest of the request."""
    world = World(plan_of("mha", 4), 4)
    prompt = list(range(8))
    world.close(world.run([*prompt, 20, 21, 22, 23]))
    world.close(world.run([30, 31, 32]))
    space = world.space
    assert space.num_free("full") == space.num_cached("full") == 4
    longer = [*prompt, *range(40, 49)]
    hit = space.lookup(longer)
    assert hit.num_tokens == 8
    assert space.can_open(16, hit=hit)
    assert not space.can_open(17, hit=hit)
    assert space.can_open(16) and not space.can_open(17)
    sequence = world.open(longer)
    assert space.num_free("full") == 2
    world.compute(sequence, 8)
    world.check()


def test_pages_that_others_hold_cost_nothing_to_share() -> None:
    world = World(plan_of("mha", 4), 4)
    running = world.run(list(range(8)))
    longer = [*range(8), *range(20, 28)]
    hit = world.space.lookup(longer)
    assert world.space.can_open(16, hit=hit)
    assert not world.space.can_open(16)
    assert not world.space.can_open(17, hit=hit)
    world.compute(world.open(longer), 8)
    assert world.space.num_free("full") == 0
    assert running.num_computed == 8
    world.check()


@pytest.mark.parametrize(("family", "pages"), [("mha", 3), ("hybrid_swa", 40)])
def test_a_hit_is_good_until_something_is_evicted(family: str, pages: int) -> None:
    """A whole node here, a window page there."""
    world = World(plan_of(family, 4, window_pages=4), pages)
    world.close(world.run(list(range(8))))
    hit = world.space.lookup(list(range(9)))
    assert world.space.can_open(9, hit=hit)
    world.run([50, 51, 52, 53, 54, 55, 56, 57, 58][: 5 if family == "mha" else 9])
    with pytest.raises(PageError, match="look the tokens up again"):
        world.space.can_open(9, hit=hit)


REQUEST = st.tuples(st.integers(0, 12), st.lists(st.integers(0, 1), max_size=12))


@settings(max_examples=300, deadline=None)
@given(
    family=st.sampled_from(FAMILIES),
    page_tokens=st.sampled_from([2, 4]),
    window=st.integers(1, 9),
    window_pages=st.integers(2, 9),
    pages=st.integers(2, 12),
    before=st.lists(REQUEST, max_size=5),
    ends=st.lists(st.booleans(), min_size=5, max_size=5),
    asked=REQUEST,
    more=st.integers(1, 12),
    step=st.integers(1, 6),
    promises=st.lists(st.integers(0, 12), min_size=5, max_size=5),
    order=st.randoms(use_true_random=False),
)
def test_what_is_admitted_reaches_its_length_beside_what_was_promised(
    family: str,
    page_tokens: int,
    window: int,
    window_pages: int,
    pages: int,
    before: list[tuple[int, list[int]]],
    ends: list[bool],
    asked: tuple[int, list[int]],
    more: int,
    step: int,
    promises: list[int],
    order: random.Random,
) -> None:
    plan = plan_of(family, page_tokens, window=window, window_pages=window_pages)
    world = World(plan, pages)

    def advance(sequence: SequencePages, goal: int) -> None:
        goal = min(goal, sequence.num_computed + step)
        tokens = world.live[sequence]
        tokens += [1] * (goal - len(tokens))
        world.compute(sequence, goal - sequence.num_computed)

    for (same, rest), ends_now in zip(before, ends, strict=False):
        sequence = world.open([*[0] * same, *rest])
        while sequence.num_computed < same + len(rest) and world.space.can_grow(
            sequence, min(same + len(rest), sequence.num_computed + step)
        ):
            advance(sequence, same + len(rest))
        if ends_now:
            world.close(sequence)
    goals = {s: s.num_computed + p for s, p in zip(world.live, promises, strict=False)}
    same, rest = asked
    tokens = [*[0] * same, *rest]
    hit, goal = world.space.lookup(tokens), len(tokens) + more
    if not world.space.can_open(goal, step, hit, promised=list(goals.items())):
        if not world.live:  # then a hit must never be in the way
            assert not world.space.fits(goal, step)
        return
    goals[world.open(tokens)] = goal
    while late := [s for s, goal in goals.items() if s.num_computed < goal]:
        sequence = order.choice(late)
        advance(sequence, goals[sequence])
        world.check()


@given(
    family=st.sampled_from(FAMILIES),
    page_tokens=st.sampled_from([2, 4]),
    window=st.integers(1, 9),
    window_pages=st.integers(1, 9),
    pages=st.integers(1, 9),
    step=st.integers(1, 9),
)
def test_max_tokens_is_the_longest_that_fits(
    family: str, page_tokens: int, window: int, window_pages: int, pages: int, step: int
) -> None:
    plan = plan_of(family, page_tokens, window=window, window_pages=window_pages)
    space = CacheSpace(plan, pages)
    most = space.max_tokens(step)
    if most is None:
        assert space.fits(10_000, step)
    else:
        assert space.fits(most, step) and not space.fits(most + 1, step)


def test_f53_a_full_pool_and_a_prompt_sent_again() -> None:
    """Eviction at 100 %: what a cached prompt reads equals a fresh run, whatever was evicted."""
    world = World(plan_of("hybrid_swa", 4, window_pages=8), 12)
    prompt = list(range(22))
    world.close(world.run(prompt, step=5))
    hits = set()
    for noise in range(100, 1000, 50):
        for length in (9, 30, 46):
            other = world.open(range(noise, noise + length))
            while world.space.can_grow(other, min(length, other.num_computed + 5)) and (
                other.num_computed < length
            ):
                world.compute(other, min(5, length - other.num_computed))
            assert not length > 40 or world.space.num_free("full") == 0
            world.close(other)
            again = world.run(prompt, step=5)  # reads each row it sees, and compares
            hits.add(again.num_cached)
            world.close(again)
            world.check()
    assert len(hits) > 1 and max(hits) == 21


def test_f45_side_calls_leave_a_conversation_its_prefix() -> None:
    """Two conversations in turns and a short call between: hits grow with them, to the end."""
    for family in ("mha", "hybrid_swa", "qsa"):
        world = World(plan_of(family, 4, window=8, window_pages=24), 60)
        talks = {who: [who] for who in (1000, 2000)}
        for turn in range(6):
            for who, said in talks.items():
                asked = [*said, *range(who + 10 * turn, who + 10 * turn + 7)]
                sequence = world.run(asked, step=4)
                grain = world.pool.plan.granularity
                assert sequence.num_cached == (len(said) // grain * grain if turn else 0), family
                world.close(sequence)
                talks[who] = asked
                world.close(world.run([5, turn, 6], step=4))
                world.check()
        # of the window tier only pages go that a window has passed
        assert (world.space.stats().evicted_pages > 0) == (family == "hybrid_swa")
        assert world.space.num_cached("full") == world.space._allocators["full"].num_pages - (
            world.space._allocators["full"].num_free
        )


def test_leaves_are_evicted_first_and_the_least_recently_used_of_them() -> None:
    world = World(plan_of("mha", 2), 6)
    a, b = [1, 1, 2, 2], [1, 1, 3, 3, 4, 4]
    world.close(world.run(a))
    world.close(world.run(b))
    world.close(world.run([*a, 9]))  # a is younger now, and has a part of a page more
    assert world.space.num_cached("full") == 5

    def cached() -> tuple[int, int]:
        return tuple(world.space.lookup([*t, 0]).num_tokens for t in (a, b))

    seen = [cached()]
    greedy = world.space.open()
    for pages in range(1, 7):
        greedy.grow(2 * pages)
        world.check()
        if cached() != seen[-1]:
            seen.append(cached())
    assert seen == [(4, 6), (4, 4), (4, 2), (2, 2), (0, 0)]


def test_a_hit_makes_a_page_young_again() -> None:
    world = World(plan_of("mha", 2), 2)
    for tokens in ([1, 1], [2, 2]):
        world.close(world.run(tokens))
    world.close(world.open([1, 1, 9]))
    greedy = world.space.open()
    greedy.grow(1)
    assert world.space.lookup([1, 1, 9]).num_tokens == 2
    assert world.space.lookup([2, 2, 9]).num_tokens == 0


def test_eviction_takes_no_more_than_it_must() -> None:
    world = World(plan_of("hybrid_swa", 2, window=4, window_pages=10), 10)
    world.close(world.run(list(range(20)), step=2))
    assert world.space.num_cached("full") == world.space.num_cached("window") == 10
    sequence = world.space.open()
    sequence.grow(6)
    assert world.space.num_cached("full") == 7
    # window pages of the nodes that went made room there too
    assert world.space.num_cached("window") == 7
    world.check()


def test_the_whole_pool_can_be_had_again_from_a_window_alone() -> None:
    """No page, no child, no holder: nothing is left of a node."""
    world = World(plan_of("all_window", 2, window=5), 8)
    sequence = world.run(list(range(60)), step=3)
    assert len(world.space._tree.nodes) == 30
    world.close(sequence)
    greedy = world.space.open()
    greedy.grow(16)
    world.check()
    assert not world.space._tree.nodes and not world.space._tree.roots


def test_a_fork_shares_whole_pages_and_copies_the_rest() -> None:
    world = World(plan_of("qsa", 4, max_requests=3), 8)
    parent = world.run(list(range(7)))
    twin = world.fork(parent)
    assert twin.tables["full"][0] == parent.tables["full"][0]
    assert twin.tables["full"][1] != parent.tables["full"][1]
    assert twin.tables["ring"] != parent.tables["ring"]
    assert world.space.num_free("full") == 5
    for sequence, token in ((parent, 50), (twin, 60)):
        world.live[sequence] += [token] * 5
        world.compute(sequence, 5)
        world.check()
    world.fork(parent)
    with pytest.raises(OutOfPages, match="in tier 'ring' to fork"):
        parent.fork()
    world.check()


def test_a_fork_needs_something_that_copies() -> None:
    world = World(plan_of("mha", 4), 8, copy=False)
    parent = world.run(list(range(7)))
    with pytest.raises(PageError, match=r"copy_page=pool\.copy_page"):
        parent.fork()
    world.live[parent].append(7)
    world.compute(parent, 1)
    assert world.fork(parent).tables == parent.tables
    world.check()


@pytest.mark.parametrize("fork", [False, True])
def test_a_copy_that_fails_leaves_nothing_behind(fork: bool) -> None:
    world = World(plan_of("hybrid_swa", 4), 8)
    parent = world.run(list(range(7)))
    if not fork:
        world.close(parent)
    free = {tier: world.space.num_free(tier) for tier in ("full", "window")}

    def fails(tier: str, source: int, target: int) -> None:
        raise MemoryError(tier)

    world.space.copy_page = fails
    with pytest.raises(MemoryError):
        world.space.open(list(range(9))) if not fork else parent.fork()
    assert {tier: world.space.num_free(tier) for tier in free} == free
    world.check()


def test_a_ring_is_a_page_of_each_request_that_runs() -> None:
    space = CacheSpace(plan_of("qsa", 4, max_requests=2), 8)
    first, second, third = space.open(), space.open(), space.open()
    assert space.num_free("ring") == 2
    first.grow(0)
    assert first.tables["ring"] == []
    first.grow(1)
    first.grow(9)
    second.grow(1)
    assert [len(s.tables["ring"]) for s in (first, second)] == [1, 1]
    assert not space.can_grow(third, 1) and not space.can_open(1)
    with pytest.raises(OutOfPages, match="in tier 'ring'"):
        third.grow(1)
    assert third.tables == {"full": [], "ring": []}
    with pytest.raises(PageError, match=r"tables\['ring'\]\[0\]"):
        first.slots("ring", 0, 1)
    for name in ("scratch", "window"):
        with pytest.raises(KeyError, match=name):
            space.num_free(name)
    second.close()
    third.grow(1)
    assert space.num_cached("ring") == space.num_evictable("ring") == 0
    space.check_integrity()


def running(world: World) -> SequencePages:
    return next(iter(world.live))


def swap_page(world: World) -> None:
    """A running sequence with a page of its own for tokens that the cache has another of."""
    allocator, table = world.space._allocators["full"], running(world).tables["full"]
    allocator.release([table[0]])
    [table[0]] = allocator.alloc(1)


DAMAGE: dict[str, Callable[[World], object]] = {
    "page lost by the cache": lambda w: w.space._allocators["full"].release([node(w).pages[0]]),
    "page of nobody": lambda w: w.space._allocators["full"].alloc(1),
    "page gone from a node": lambda w: node(w).pages.__setitem__(0, -1),
    "pages of a tier too many": lambda w: node(w).pages.append(-1),
    "window page of another node": lambda w: w.space._tree.window_nodes[1].clear(),
    "window page not queued": lambda w: w.space._tree.let_go[1].pop(),
    "page queued that is held": lambda w: w.space._tree.let_go[1].push(
        node(w, held=True).pages[1], passed=True
    ),
    "leaf not queued": lambda w: w.space._tree.leaves.pop(),
    "leaf used since": lambda w: setattr(node(w), "used", 10**6),
    "parent older than its child": lambda w: setattr(node(w, tail=True).parent, "used", 0),
    "holder lost": lambda w: setattr(node(w, held=True), "holders", 0),
    "holder too many": lambda w: setattr(node(w), "holders", 1),
    "nodes without holders miscounted": lambda w: setattr(w.space._tree, "unheld", 0),
    "other tokens": lambda w: setattr(node(w), "tokens", b"\0" * len(node(w).tokens)),
    "other key": lambda w: setattr(node(w), "key", b"\0" * 16),
    "under another key": lambda w: w.space._tree.nodes.update(
        {b"": w.space._tree.nodes.pop(node(w).key)}
    ),
    "part of a page with more": lambda w: setattr(node(w), "tokens", node(w).tokens + b"1234" * 4),
    "child unknown to its parent": lambda w: node(w).unlink(),
    "parent of nobody": lambda w: setattr(node(w), "parent", None),
    "node unknown": lambda w: w.space._tree.nodes.pop(node(w).key),
    "root of another adapter": lambda w: w.space._tree.roots.update(
        {"x": w.space._tree.roots.pop("")}
    ),
    "root without children": lambda w: w.space._tree.roots.update({"": nodeless(w)}),
    "path cut at its begin": lambda w: running(w)._path.pop(0),
    "path cut at its end": lambda w: running(w)._path.pop(),
    "two pages for the same tokens": swap_page,
    "told more than computed": lambda w: setattr(running(w), "_loose", b"\0" * 64),
    "part in a cache that is off": lambda w: setattr(w.space, "prefix_cache", False),
    "cached beyond computed": lambda w: setattr(running(w), "num_cached", 99),
    "another allocator": lambda w: w.space._allocators.update(full=PageAllocator(16)),
}


def node(world: World, *, held: bool = False, tail: bool = False) -> Node:
    """A leaf that nobody holds (a part of a page, if `tail`), or one that somebody does."""
    for found in reversed(list(world.space._tree.nodes.values())):
        if bool(found.holders) == held and not found.children:
            parent = found.parent
            if not tail or (parent is not None and parent.parent and not parent.holders):
                return found
    raise AssertionError("no such node")


def nodeless(world: World) -> Root:
    return Root(world.space.plan, world.space.namespace, "")


@pytest.mark.parametrize("damage", DAMAGE)
def test_check_integrity_finds_each_kind_of_damage_to_the_cache(damage: str) -> None:
    world = World(plan_of("hybrid_swa", 4, window=5, window_pages=12), 16)
    world.run([1, 2, 3, 4, 5, 6, 7, 8, 9])
    world.close(world.run([*range(20, 31)]))
    world.check()
    DAMAGE[damage](world)
    with pytest.raises(IntegrityError):
        world.space.check_integrity()
