"""What `can_open` and `fits` promise is there, and they promise nothing of what makes no sense."""

from __future__ import annotations

from typing import Any

import pytest
from space_world import World, plan_of

from kvq_pools import CacheSpace, PageError, PrefixHit


@pytest.mark.parametrize("family", ["mha", "hybrid_swa", "qsa"])
def test_an_answer_given_before_takes_no_more_pages_than_it_has(family: str) -> None:
    """The same prompt, decoded greedily, says the same again: into pages that are cached."""
    world = World(plan_of(family, 2), 12, copy=False)
    said = list(range(20))
    world.close(world.run(said, step=4))
    hit = world.space.lookup(said[:3])
    assert world.space.can_open(20, 1, hit)
    again = world.open(said[:3])
    world.live[again] = said
    while again.num_computed < 20:
        world.compute(again, 1)
        world.check()
    assert world.space.num_free("full") == 2


@pytest.mark.parametrize("mine_first", [False, True])
@pytest.mark.parametrize("window_pages", range(4, 9))
@pytest.mark.parametrize("goal", [13, 15, 22])
def test_window_pages_of_a_hit_do_not_serve_who_has_them_again(
    goal: int, window_pages: int, mine_first: bool
) -> None:
    """They stay with the newcomer while the one that computed them slides on."""
    plan = plan_of("hybrid_swa", 2, window=4, window_pages=window_pages)
    world = World(plan, 40)
    mine = world.run(list(range(12)), step=2)
    world.live[mine] += range(100, 110)
    theirs = [*range(12), *range(200, 210)]
    possible = world.space.can_open(goal, 2, world.space.lookup(theirs), promised=[(mine, 22)])
    assert possible or window_pages < 6  # 3 pages each at most
    if not possible:
        return
    order = [(mine, 22), (world.open(theirs), goal)]
    for sequence, length in order if mine_first else order[::-1]:
        while sequence.num_computed < length:
            world.compute(sequence, min(2, length - sequence.num_computed))
    world.check()


@pytest.mark.parametrize("family", ["mha", "hybrid_swa", "all_window", "qsa"])
@pytest.mark.parametrize("step", [0, -1, True, 1.0, None, "1"])
def test_steps_of_the_wrong_kind_whatever_the_plan(family: str, step: Any) -> None:
    space = CacheSpace(plan_of(family, 4), 8)
    for ask in (
        lambda: space.can_open(4, step),
        lambda: space.fits(4, step),
        lambda: space.max_tokens(step),
    ):
        with pytest.raises(PageError, match="must be an int of at least 1"):
            ask()


def test_hits_that_are_not_the_spaces_own() -> None:
    tokens = list(range(9))
    worlds = [World(plan_of("mha", 4), 8) for _ in range(2)]
    for world in worlds:
        world.close(world.run(tokens))
    hits = [world.space.lookup(tokens) for world in worlds]
    assert hits[0].version == hits[1].version
    for mine, theirs in ((0, 1), (1, 0)):
        assert worlds[mine].space.can_open(9, 1, hits[mine])
        with pytest.raises(PageError, match="another space"):
            worlds[mine].space.can_open(9, 1, hits[theirs])
    with pytest.raises(PageError, match="another space"):
        worlds[0].space.can_open(9, 1, PrefixHit())


def test_a_length_below_its_own_hit_is_a_mistake() -> None:
    tokens = list(range(9))
    world = World(plan_of("mha", 4), 8)
    world.close(world.run(tokens))
    hit = world.space.lookup(tokens)
    assert hit.num_tokens == 8
    assert world.space.can_open(8, 1, hit)
    with pytest.raises(PageError, match="num_tokens is 7, yet the hit has 8"):
        world.space.can_open(7, 1, hit)


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.0], ["a"], [None], "ab"])
def test_what_is_no_token_is_refused_with_and_without_a_cache(
    tokens: Any, prefix_cache: bool
) -> None:
    space = CacheSpace(plan_of("mha", 4), 8, prefix_cache=prefix_cache)
    for use in (space.lookup, space.open):
        with pytest.raises(PageError, match="tokens must be ints"):
            use(tokens)
    assert space.stats().lookups == 0
    space.check_integrity()
    assert not space._sequences
