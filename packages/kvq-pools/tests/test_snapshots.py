"""Snapshots: what belongs to cached tokens beside their pages, in a bounded number of places."""

from __future__ import annotations

import random

import pytest
from space_world import plan_of

from kvq_pools import CacheSpace, IntegrityError, PageError, Pool, rebuild
from kvq_pools.snapshots import Snapshots

PAGE = 4


class Model:
    """Keeps the very tokens that were computed where a model would keep what it made of them."""

    def __init__(self, places: int, num_pages: int = 40, family: str = "mha") -> None:
        self.tokens = {}  # sequence → its tokens
        self.kept = {}  # place → tokens
        self.able = True
        self.pool = Pool(plan_of(family, PAGE, window=9), num_pages)
        self.space = CacheSpace(
            self.pool.plan,
            num_pages,
            prefix_cache=True,
            copy_page=self.pool.copy_page,
            snapshots=places,
            save=self.save,
        )

    def save(self, sequence, place) -> bool:
        if self.able:
            self.kept[place] = self.tokens[sequence][: sequence.num_computed]
        return self.able

    def open(self, tokens):
        """A sequence, which knows what belongs to the tokens that it begins with."""
        sequence = self.space.open(tokens)
        self.tokens[sequence] = list(tokens)
        if sequence.num_cached:
            assert self.kept[sequence.snapshot] == tokens[: sequence.num_cached]
        else:
            assert sequence.snapshot is None
        return sequence

    def compute(self, sequence, count: int, keep: bool = False, passed: bool = False) -> None:
        end = sequence.num_computed + count
        sequence.grow(end)
        sequence.advance(end, self.tokens[sequence])
        if keep:
            assert sequence.keep(passed=passed)

    def ask(self, tokens, stop: int | None = None) -> int:
        """Compute tokens to their end, a snapshot on the way; how many were cached."""
        sequence = self.open(tokens)
        cached = sequence.num_cached
        if stop is not None and stop > cached:
            self.compute(sequence, stop - cached, keep=True)
        self.compute(sequence, len(tokens) - sequence.num_computed)
        sequence.close()
        self.space.check_integrity()
        return cached

    @property
    def stats(self):
        return self.space.snapshot_stats()


def tokens(count: int, seed: int = 0) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(1000) for i in range(count)]


def test_a_hit_ends_where_there_is_a_snapshot():
    model = Model(8)
    assert model.ask(tokens(18), stop=8) == 0
    assert model.ask(tokens(18)) == 8  # pages reach to 17
    assert (model.stats.hits, model.stats.missed_tokens) == (1, 9)
    longer = tokens(18) + tokens(5, 1)
    assert model.ask(longer) == 18  # where the first ended, within a page


def test_what_is_no_end_of_a_page_is_not_kept_on_the_way():
    model = Model(8)
    sequence = model.open(tokens(18))
    model.compute(sequence, 6)
    assert not sequence.keep()
    model.compute(sequence, 2)
    assert sequence.keep() and model.stats.held == 1
    assert sequence.keep() and model.stats.held == 1  # there is one already
    sequence.close()
    with pytest.raises(PageError, match="closed"):
        sequence.keep()


def test_without_tokens_or_a_cache_nothing_is_kept():
    model = Model(8)
    sequence = model.open(tokens(8))
    sequence.grow(8)
    sequence.advance(8)  # nobody says of which tokens
    assert not sequence.keep()
    sequence.close()
    assert model.stats.held == 0


def test_a_state_that_is_not_there_takes_nobodys_place():
    model = Model(1)
    model.ask(tokens(8))
    model.able = False
    assert model.ask(tokens(30, 1)) == 0
    model.able = True
    assert (model.stats.held, model.stats.evicted) == (1, 0)
    assert model.ask([*tokens(8), 1]) == 8


def test_the_cheapest_to_compute_again_is_given_up():
    model = Model(2, num_pages=200)
    model.ask(tokens(100))
    for seed in range(1, 9):
        model.ask(tokens(8, seed))
    assert model.ask([*tokens(100), 7]) == 100
    assert model.stats.evicted == 7 + 1


def test_of_equal_ones_the_least_recently_used_is_given_up():
    model = Model(2)
    for seed in (1, 2):
        model.ask(tokens(8, seed))
    other = model.open([*tokens(8, 1), 3])  # a use
    other.close()
    model.ask(tokens(8, 3))
    assert model.ask([*tokens(8, 2), 3]) == 0
    model = Model(2)
    for seed in (1, 2, 3):
        model.ask(tokens(8, seed))
    assert model.ask([*tokens(8, 1), 3]) == 0


def test_no_snapshot_stays_for_ever():
    model = Model(2, num_pages=400)
    model.ask(tokens(100))
    for seed in range(1, 60):
        model.ask(tokens(8, seed))
    assert model.ask([*tokens(100), 7]) == 0


def test_a_long_way_keeps_them_apart_and_takes_nobodys_place():
    model = Model(4, num_pages=200)
    for seed in (1, 2):
        model.ask(tokens(6, seed))
    sequence = model.open(tokens(320))
    for _ in range(20):
        model.compute(sequence, 16)
        sequence.keep(passed=True)
    assert model.ask([*tokens(6, 1), 3]) == 6
    assert model.ask([*tokens(6, 2), 3]) == 6
    ends = sorted(len(kept) for kept in model.kept.values())[2:]
    assert len(ends) == 2 and ends[0] >= 64 and ends[1] - ends[0] >= 64


def test_a_long_way_finds_no_place_where_all_are_wanted():
    model = Model(2, num_pages=200)
    for seed in (1, 2):
        model.ask(tokens(6, seed))
    sequence = model.open(tokens(320))
    for _ in range(20):
        model.compute(sequence, 16)
        assert not sequence.keep(passed=True)
    assert model.stats.evicted == 0
    assert [model.ask([*tokens(6, seed), 3]) for seed in (1, 2)] == [6, 6]


def test_rows_that_tokens_share_are_not_cut_by_one():
    model = Model(8, family="qsa")  # two tokens a row
    model.ask(tokens(7))
    assert model.stats.held == 0  # pages end after six
    model.ask(tokens(6, 1))
    assert model.ask([*tokens(6, 1), 3, 4]) == 6


def test_those_that_were_passed_go_before_cheaper_ones_and_stay_once_used():
    model = Model(2, num_pages=200)
    way = model.open(tokens(100))
    model.compute(way, 96, keep=True, passed=True)
    model.ask(tokens(5, 1))
    model.ask(tokens(5, 2))
    assert model.ask([*tokens(5, 1), 3]) == 5
    assert model.ask([*tokens(96), 3]) == 0
    model = Model(2, num_pages=200)
    way = model.open(tokens(100))
    model.compute(way, 96, keep=True, passed=True)
    model.open([*tokens(96), 3]).close()
    for seed in (1, 2, 3):
        model.ask(tokens(5, seed))
    assert model.ask([*tokens(96), 3]) == 96


def test_a_place_is_not_written_before_its_reader_has_read():
    model = Model(1, num_pages=100)
    model.ask(tokens(8))
    reader = model.open([*tokens(8), 3])
    place = reader.snapshot
    model.space.drop_cached()
    model.ask(tokens(90, 1))
    assert model.kept[place] == tokens(8) and model.stats.held == 0
    model.compute(reader, 1)
    assert reader.snapshot is None
    model.ask(tokens(90, 2))
    assert model.stats.held == 1


def test_it_goes_with_its_pages():
    model = Model(8, num_pages=10)
    model.ask(tokens(12))
    model.ask(tokens(38, 1))
    assert model.ask([*tokens(12), 3]) == 0
    assert model.stats.evicted == 0


def test_a_rebuild_keeps_those_of_pages_that_stay():
    model = Model(8, num_pages=20)
    model.ask(tokens(16), stop=8)
    model.ask(tokens(16, 1))
    rebuild(model.pool, model.space, 30)
    model.space.check_integrity()
    assert model.ask([*tokens(8), 3]) == 8
    rebuild(model.pool, model.space, 3)
    model.space.check_integrity()
    assert model.stats.held == 2  # of the two pages used last and the part of one behind them
    rebuild(model.pool, model.space, 20, plan=plan_of("mha", 2 * PAGE, window=9))
    assert (model.stats.held, model.space.num_snapshots) == (0, 8)
    assert model.ask(tokens(16)) == 0


def test_without_places_pages_are_enough():
    model = Model(0)
    sequence = model.space.open(tokens(16))
    sequence.grow(16)
    sequence.advance(16, tokens(16))
    assert not sequence.keep()
    sequence.close()
    assert model.space.open(tokens(16)).num_cached == 15
    assert model.stats.missed_tokens == 0


@pytest.mark.parametrize("places", [-1, 1.5, True, None])
def test_places_are_a_whole_number(places):
    with pytest.raises(PageError, match="snapshots"):
        Snapshots(places)


def test_integrity_finds_a_place_that_two_have_and_one_of_a_page_that_is_gone():
    model = Model(8)
    model.ask(tokens(16), stop=8)
    first, second = model.space._tree.snapshots._of.values()
    second.place, before = first.place, second.place
    with pytest.raises(IntegrityError, match="places"):
        model.space.check_integrity()
    second.place = before
    model.space.check_integrity()
    model.space._tree.snapshots.check(model.space._tree.nodes.values())
    with pytest.raises(IntegrityError, match="gone"):
        model.space._tree.snapshots.check(())


@pytest.mark.parametrize("family", ["mha", "hybrid_swa"])
@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_a_snapshot_is_of_the_tokens_that_a_sequence_begins_with(seed, family):
    """`Model.open` looks at what each begins with."""
    rng = random.Random(seed)
    model = Model(rng.choice([1, 3, 8]), num_pages=24, family=family)
    stems, live = [tokens(30, n) for n in range(3)], []
    for _ in range(400):
        done = rng.random()
        if done < 0.3:
            asked = rng.choice(stems)[: rng.randint(1, 30)] + tokens(rng.randint(1, 5), seed)
            live.append(model.open(asked))
        elif not live:
            continue
        elif done < 0.7:
            sequence = rng.choice(live)
            more = len(model.tokens[sequence]) - sequence.num_computed
            count = min(more, rng.randint(1, 9))
            if count and model.space.can_grow(sequence, sequence.num_computed + count):
                model.compute(sequence, count)
                sequence.keep(passed=rng.random() < 0.5)
        elif done < 0.95:
            live.pop(rng.randrange(len(live))).close()
        elif done < 0.97:
            source = rng.choice(live)
            if all(model.space.num_free(tier) for tier in source.tables):
                twin = source.fork()
                model.tokens[twin] = list(model.tokens[source])
                live.append(twin)
        elif done < 0.99:
            rebuilt = rebuild(model.pool, model.space, rng.randint(8, 40), running=live)
            live = [sequence for sequence in live if sequence not in rebuilt.dropped]
        else:
            model.space.drop_cached()
        model.space.check_integrity()
    assert model.stats.hits > 3
