"""What the prefix cache finds, and what it must not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from space_world import World, plan_of

import kvq_codecs
from kvq_pools import CacheSpace, PageError, PrefixStats, SequencePages
from kvq_pools import nodes as nodes_module

PROMPT = [7, 7, 1, 2, 3, 4, 5, 6, 8, 9, 10]  # 11 tokens: pages of 4, 4 and 3
FAMILIES = ("mha", "hybrid_swa", "all_window", "qsa")
CODECS = {name: 128 if name.startswith("iso") else 32 for name in kvq_codecs.names()}


def raw(world: World, sequence: SequencePages, seen_from: int, stop: int) -> list[bytes]:
    """The bytes of every plane of the rows at [0, stop), [seen_from, stop) where a window is."""
    found = []
    for tier in world.pool.plan.tiers:
        if tier.scope != "position":
            continue
        first = seen_from if tier.window else 0
        at = sequence.slots(tier.name, first, stop)
        for slab in tier.slabs:
            group = slab.slots_per_row
            closing = at[(np.arange(first, stop) + 1) % group == 0]
            pages, rows = (
                closing // world.pool.plan.page_tokens,
                (closing % world.pool.plan.page_tokens // group),
            )
            for layer in slab.layers:
                for plane in world.pool.view(slab.name, layer).planes.values():
                    found.append(plane[pages, :, rows].tobytes())
    return found


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("family", FAMILIES)
def test_p010_a_hit_reads_exactly_the_bytes_that_were_stored(family: str, codec: str) -> None:
    """Prefix caching over a quantized cache: shared pages and the copied one alike."""
    world = World(plan_of(family, 4, codec=codec, dim=CODECS[codec], window=9), 16)
    first = world.run(PROMPT, step=4)
    stored = raw(world, first, 3, 10)
    world.close(first)
    again = world.open(PROMPT)
    assert again.num_computed == 10
    world.check()
    assert raw(world, again, 3, 10) == stored
    assert any(set(planes) != {0} for planes in stored)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_token_is_left_and_the_partly_filled_page_is_copied(family: str) -> None:
    world = World(plan_of(family, 4), 16)
    first = world.run(PROMPT)
    world.close(first)
    grain = world.pool.plan.granularity
    for tokens, expected in (
        (PROMPT, 10),
        (PROMPT[:8], 7),
        ([*PROMPT, 50], 11),
        ([*PROMPT[:6], 50], 6),
        ([*PROMPT[:5], 50, 51], 5),
        ([50, *PROMPT], 0),
        (PROMPT[:1], 0),
        ([], 0),
    ):
        assert world.space.lookup(tokens).num_tokens == expected // grain * grain, tokens
    sequence = world.open([*PROMPT, 50])
    tables = str(sequence.tables)
    world.compute(sequence, len(PROMPT) + 1 - sequence.num_computed)
    other = world.open([*PROMPT, 60])  # the copy was written to, the page was not
    world.compute(other, len(PROMPT) + 1 - other.num_computed)
    world.check()
    assert (
        other.tables["window" if family == "all_window" else "full"][-1]
        not in (sequence.tables["window" if family == "all_window" else "full"])
    )
    assert tables != str(other.tables)


def test_without_copy_page_whole_pages_are_shared_alone() -> None:
    world = World(plan_of("mha", 4), 16, copy=False)
    world.close(world.run(PROMPT))
    assert world.space.lookup(PROMPT).num_tokens == 8
    assert world.space.lookup(PROMPT[:8]).num_tokens == 4


def test_pages_are_found_while_they_are_being_computed() -> None:
    world = World(plan_of("mha", 4), 16)
    first = world.open(PROMPT)
    world.compute(first, 6)
    assert world.space.lookup(PROMPT).num_tokens == 4  # a page filled in part is private yet
    world.compute(first, 3)
    second = world.open(PROMPT)
    assert second.num_computed == 8
    assert second.tables["full"] == first.tables["full"][:2]


def test_a_cancelled_prefill_leaves_what_it_computed_and_no_more() -> None:
    world = World(plan_of("mha", 4), 16)
    sequence = world.open(PROMPT)
    world.compute(sequence, 5)
    sequence.grow(11)  # pages for the next step, which never came
    world.close(sequence)
    assert world.space.lookup(PROMPT).num_tokens == 5
    assert world.space.num_cached("full") == 2
    world.check()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_tokens_computed_at_the_same_time_end_in_one_page(family: str) -> None:
    world = World(plan_of(family, 4, window=20), 16)
    both = [world.open(PROMPT), world.open(PROMPT)]
    for sequence in both:
        sequence.grow(11)
    tier = world.pool.plan.tiers[0].name
    first = both[0].tables[tier][:2]
    assert not {*first} & {*both[1].tables[tier]}
    for sequence in both:
        world.compute(sequence, 11)
        world.check()
    assert both[1].tables[tier][:2] == first
    assert world.space.num_cached(tier) == 2
    assert world.space.num_free(tier) == world.pool.pages(tier) - 4
    for sequence in both:
        world.close(sequence)
        world.check()
    assert world.space.num_cached(tier) == 3


def test_a_sequence_alone_has_the_whole_pool() -> None:
    """Two of the same prompt, of which one ends: the other may fill all pages."""
    world = World(plan_of("mha", 4), 5)
    both = [world.open(PROMPT[:8]), world.open(PROMPT[:8])]
    for _ in range(2):
        for sequence in both:
            world.compute(sequence, 4)
    world.close(both[0])
    world.live[both[1]] += range(20, 32)
    world.compute(both[1], 12)
    assert world.space.num_free("full") == 0
    world.check()


def other_space(**changes: Any) -> World:
    """The space of `PROMPT`, with one thing changed."""
    arguments: dict[str, Any] = {"family": "mha", "page_tokens": 4, "codec": "q8_0", "dim": 32}
    names = {"namespace": "a model"}
    for name, value in changes.items():
        (names if name in names else arguments)[name] = value
    return World(plan_of(**arguments), 16, **names)


def keys(world: World) -> set[bytes]:
    return set(world.space._tree.nodes)


@pytest.mark.parametrize(
    "changes",
    [
        {"codec": "q4_0"},
        {"codec": "fp8"},
        {"page_tokens": 2},
        {"page_tokens": 8},
        {"dim": 64},
        {"namespace": "another model"},
        {"family": "hybrid_swa"},
    ],
    ids=str,
)
def test_another_layout_or_model_has_other_keys(changes: dict[str, Any]) -> None:
    mine, same, other = other_space(), other_space(), other_space(**changes)
    for world in (mine, same, other):
        world.close(world.run(PROMPT))
    assert keys(mine) and keys(mine) == keys(same)
    assert not keys(mine) & keys(other)


def test_namespace_and_adapter_are_told_apart() -> None:
    """Names that give the same characters one after the other."""
    roots = {nodes_module.root_key(plan_of("mha", 4), *n) for n in (("ab", ""), ("a", "b"))}
    assert len(roots) == 2


def test_more_pages_or_requests_change_no_key() -> None:
    few, many = plan_of("qsa", 4, max_requests=2), plan_of("qsa", 4, max_requests=9)
    assert nodes_module.root_key(few, "", "") == nodes_module.root_key(many, "", "")


def test_another_adapter_shares_nothing() -> None:
    world = World(plan_of("mha", 4), 16)
    world.close(world.run(PROMPT, "one"))
    assert world.space.lookup(PROMPT, "one").num_tokens == 10
    assert world.space.lookup(PROMPT, "two").num_tokens == 0
    assert world.space.lookup(PROMPT).num_tokens == 0
    world.run(PROMPT, "two")
    world.check()


@pytest.mark.parametrize("changed", range(len(PROMPT)))
def test_one_other_token_ends_the_hit_there(changed: int) -> None:
    world = World(plan_of("mha", 4), 16)
    world.close(world.run(PROMPT))
    tokens = [*PROMPT]
    tokens[changed] = 99
    assert world.space.lookup([*tokens, 1]).num_tokens == changed


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_that_collide_share_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hash of one bit: hits become rare, never wrong."""
    import kvq_pools.check
    import kvq_pools.prefix
    import kvq_pools.tree

    def weak(parent: bytes, tokens: bytes) -> bytes:
        return bytes([nodes_module.chain(parent, tokens)[0] & 1])

    for module in (kvq_pools.prefix, kvq_pools.tree, kvq_pools.check):
        monkeypatch.setattr(module, "chain", weak)
    world, rng = World(plan_of(family, 2, window_pages=40), 40), np.random.default_rng(0)
    hits = 0
    for _ in range(60):
        sequence = world.open(rng.integers(0, 2, rng.integers(1, 9)).tolist())
        hits += sequence.num_computed
        world.compute(sequence, len(world.live[sequence]) - sequence.num_computed)
        world.check()
        if len(world.live) > 2:
            world.close(next(iter(world.live)))
    assert hits


CONVERSATIONS = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1), min_size=1, max_size=9)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(
    family=st.sampled_from(FAMILIES),
    page_tokens=st.sampled_from([2, 4]),
    turns=CONVERSATIONS,
    ends=st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_with_room_to_spare_nothing_is_computed_twice(
    family: str, page_tokens: int, turns: list[tuple[int, list[int]]], ends: list[bool]
) -> None:
    """The hit is as long as the longest common prefix with anything computed before."""
    world = World(plan_of(family, page_tokens, window_pages=400, max_requests=8), 400)
    said: dict[int, list[int]] = {n: [] for n in range(4)}
    whole: list[list[int]] = []  # of running sequences, of which whole pages are known
    ended: list[list[int]] = []
    grain = world.pool.plan.granularity
    for (who, more), ends_now in zip(turns, ends, strict=False):
        tokens = said[who] = [*said[who], *more]
        known = [t[: len(t) // page_tokens * page_tokens] for t in whole] + ended
        longest = max((common(old, tokens) for old in known), default=0)
        wanted = min(longest, len(tokens) - 1) // grain * grain
        assert world.space.lookup(tokens).num_tokens == wanted
        sequence = world.run(tokens, step=3)
        assert sequence.num_cached == wanted
        whole.append(tokens)
        if ends_now:
            world.close(sequence)
            ended.append(tokens[: len(tokens) // grain * grain])
        world.check()


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


@settings(max_examples=150, deadline=None)
@given(
    window=st.integers(1, 13),
    page_tokens=st.sampled_from([1, 2, 3, 4]),
    window_pages=st.integers(4, 16),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    asked=st.integers(1, 34),
    family=st.sampled_from(["hybrid_swa", "all_window"]),
)
def test_a_hit_ends_where_the_window_finds_every_page_it_sees(
    window: int,
    page_tokens: int,
    window_pages: int,
    lengths: list[int],
    asked: int,
    family: str,
) -> None:
    """Against a search through all ends, in a cache that has given up window pages."""
    plan = plan_of(family, page_tokens, window=window, window_pages=window_pages)
    world = World(plan, 64 if family == "hybrid_swa" else window_pages, copy=False)
    for start, length in enumerate(lengths):
        tokens = list(range(length)) if start % 2 == 0 else [100 + start, *range(length)]
        sequence = world.open(tokens)
        while sequence.num_computed < length:
            goal = min(length, sequence.num_computed + 2)
            if not world.space.can_grow(sequence, goal):
                break
            world.compute(sequence, goal - sequence.num_computed)
        world.close(sequence)
        world.check()
    tree = world.space._tree
    number = tree.tiers.index("window")
    path, node = [], tree.roots.get("")
    for page in range(40 // page_tokens):
        tokens = range(page * page_tokens, (page + 1) * page_tokens)
        key = (
            None if node is None else nodes_module.chain(node.key, nodes_module.token_bytes(tokens))
        )
        node = None if key is None else tree.nodes.get(key)
        path.append(node)
    ends = [
        end
        for end in range(0, asked, page_tokens)
        if all(path[p // page_tokens] is not None for p in range(end))
        and all(
            path[p // page_tokens].pages[number] != -1  # type: ignore[union-attr]
            for p in range(max(0, end - window + 1), end)
        )
    ]
    assert world.space.lookup(list(range(asked))).num_tokens == max(ends)


def test_a_long_prefill_does_not_drive_out_the_end_of_another_conversation() -> None:
    world = World(plan_of("hybrid_swa", 4, window=8, window_pages=12), 100)
    mine, other = list(range(20)), list(range(100, 180))
    world.close(world.run(mine, step=4))
    world.close(world.run(other, step=4))
    assert world.space.lookup([*mine, 1]).num_tokens == 20
    assert world.space.lookup([*other, 1]).num_tokens == 80
    assert world.space.lookup([*other[:40], 1]).num_tokens < 40  # passed, and given up first
    world.check()


@pytest.mark.parametrize(("window_pages", "hits"), [(14, [0, 24, 24, 24]), (8, [0, 0, 24, 24])])
def test_window_pages_wanted_twice_are_kept(window_pages: int, hits: list[int]) -> None:
    """Conversations that share their beginning: it is computed twice at most."""
    world = World(plan_of("hybrid_swa", 4, window=8, window_pages=window_pages), 200)
    found = []
    for user in range(4):
        tokens = [*range(24), *range(100 * user + 100, 100 * user + 140)]
        sequence = world.run(tokens, step=4)
        found.append(sequence.num_cached)
        world.close(sequence)
        world.check()
    assert found == hits


def test_a_part_of_a_page_goes_when_more_of_it_is_cached() -> None:
    world = World(plan_of("mha", 4), 16)
    for length in (5, 7, 6, 8, 7):
        world.close(world.run([*range(length)]))
        world.check()
        assert world.space.num_cached("full") == 2, length
    world.close(world.run([0, 1, 2, 3, 4, 9]))
    assert world.space.num_cached("full") == 3


def test_a_part_of_a_page_stays_where_the_whole_lost_its_window_page() -> None:
    world = World(plan_of("hybrid_swa", 4, window=6, window_pages=6), 40)
    world.close(world.run([*range(12)], step=4))
    greedy = world.space.open()
    greedy.grow(24)
    greedy.close()
    assert (world.space.num_cached("full"), world.space.num_cached("window")) == (3, 0)
    assert world.space.lookup([*range(12), 99]).num_tokens == 0
    world.close(world.run([*range(10)], step=4))
    world.check()
    assert world.space.lookup([*range(10), 99]).num_tokens == 10


def test_stats_count_what_was_asked_and_had() -> None:
    world = World(plan_of("mha", 4), 4)
    world.close(world.run(PROMPT))
    world.space.lookup(PROMPT)
    world.close(world.open(PROMPT))
    world.space.open()
    assert world.space.stats() == PrefixStats(2, 22, 10, 0)
    world.run([90, *PROMPT])
    assert world.space.stats().evicted_pages == 2


def test_dropping_the_cache_forgets_what_runs_too() -> None:
    world = World(plan_of("hybrid_swa", 4), 16)
    world.close(world.run(PROMPT))
    running = world.run([*PROMPT, *range(30, 40)])
    world.space.drop_cached()
    world.check()
    world.live[running].append(1)
    world.compute(running, 1)
    world.close(running)
    assert world.space.lookup([*PROMPT, *range(30, 40)]).num_tokens == 0
    assert world.space.num_free("full") == 16
    assert world.space._allocators["full"].num_free == 16


def test_a_sequence_that_stops_telling_adds_nothing_more() -> None:
    world = World(plan_of("mha", 4), 16)
    sequence = world.open(PROMPT)
    world.compute(sequence, 4)
    world.compute(sequence, 3, told=False)
    world.compute(sequence, 4)
    twin = world.fork(sequence)
    world.close(sequence)
    world.check()
    assert world.space.num_cached("full") == 1
    world.close(twin)
    world.check()


def test_off_means_off() -> None:
    world = World(plan_of("mha", 4), 16, prefix_cache=False)
    world.close(world.run(PROMPT))
    assert world.space.lookup(PROMPT).num_tokens == 0
    assert world.space.num_cached("full") == 0
    assert world.space._allocators["full"].num_free == 16


@pytest.mark.parametrize("bad", [[-1], [1.5], [None], ["a"], [2**32], [1, 2, -3]])
def test_what_is_no_token_is_refused_and_changes_nothing(bad: list[Any]) -> None:
    space = CacheSpace(plan_of("mha", 1), 8, prefix_cache=True)
    with pytest.raises(PageError, match="tokens must be ints of 0"):
        space.open(bad)
    sequence = space.open()
    sequence.grow(3)
    with pytest.raises(PageError, match="tokens must be ints of 0"):
        sequence.advance(len(bad), bad)
    with pytest.raises(PageError, match="2 tokens given, 3 were computed"):
        sequence.advance(3, [1, 2])
    assert sequence.num_computed == 0
    space.check_integrity()
    assert not space._tree.nodes


def test_tokens_may_be_of_any_integer_type() -> None:
    world = World(plan_of("mha", 4), 16)
    world.close(world.run(PROMPT))
    for tokens in (tuple(PROMPT), np.asarray(PROMPT, np.int32), np.asarray(PROMPT), bytes(PROMPT)):
        assert world.space.lookup(tokens).num_tokens == 10
