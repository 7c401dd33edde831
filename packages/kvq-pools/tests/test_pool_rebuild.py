"""A pool of another size: what is kept, what comes back, and a failure at every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import pytest
from device import Device, page_bytes, planes, scribble
from family_cases import FAMILIES
from pool_cases import spec

import kvq_codecs
from kvq_pools import (
    Pool,
    PoolFailed,
    PoolPlan,
    RebuildFailed,
    RebuildRejected,
    hybrid_swa,
)


def hybrid(codec: str = "fp8", window_pages: int = 3) -> PoolPlan:
    s = spec(codec)
    return hybrid_swa(
        full_layers=(1,),
        window_layers=(0, 2),
        window=6,
        kv_heads=1,
        head_dim=32,
        k=s,
        v=s,
        page_tokens=4,
        window_pages=window_pages,
    )


@dataclass(frozen=True)
class Change:
    """A rebuild: of which plan and size, to which, with which pages live and kept."""

    plan: PoolPlan
    pages: int
    after: PoolPlan
    pages_after: int
    live: Mapping[str, Sequence[int]]
    keep: Mapping[str, Mapping[int, int]]


QSA = FAMILIES["qsa"].make(spec("five"), 48, 4)
CHANGES = {
    "grow": Change(
        QSA,
        5,
        QSA,
        9,
        live={"full": [0, 1, 4], "ring": [2]},
        keep={"full": {0: 8, 1: 2, 4: 3}, "ring": {2: 0}},
    ),
    "shrink": Change(
        hybrid(),
        7,
        hybrid(),
        2,
        live={"full": [6, 0, 1, 2, 4], "window": [0, 1]},
        keep={"full": {6: 0, 2: 1}, "window": {0: 0, 1: 1}},
    ),
    "window tier grows too": Change(
        hybrid(),
        2,
        hybrid(window_pages=6),
        4,
        live={"full": [1], "window": [0, 2]},
        keep={"full": {1: 1}, "window": {2: 5, 0: 3}},
    ),
    "another codec": Change(
        hybrid(), 6, hybrid("q4_0"), 9, live={"full": [0, 2, 3, 5], "window": [1]}, keep={}
    ),
    "compact, same size": Change(
        hybrid(), 5, hybrid(), 5, live={"full": [2, 4]}, keep={"full": {2: 0, 4: 1}}
    ),
}


class Trial:
    """A pool full of noise in a device that holds no two pools at once, to be rebuilt."""

    def __init__(self, change: Change) -> None:
        self.change = change
        most = max(change.plan.nbytes(change.pages), change.after.nbytes(change.pages_after))
        self.device = Device(capacity_bytes=most)
        self.pool = self.device.pool(change.plan, change.pages)
        scribble(self.pool)
        self.held = {
            tier: sorted({*change.live.get(tier, ()), *change.keep.get(tier, {})})
            for tier in {*change.live, *change.keep}
        }
        self.before = {
            (tier, page): page_bytes(self.pool, tier, page)
            for tier, pages in self.held.items()
            for page in pages
        }
        self.steps_before = 0

    def rebuild(self, *fail_at: int, error: type[BaseException] = MemoryError) -> None:
        self.device.steps.clear()
        self.device.fail_at, self.device.error = fail_at, error
        self.pool.rebuild(
            self.change.pages_after,
            plan=self.change.after,
            live=self.change.live,
            keep=self.change.keep,
        )

    def check_as_before(self) -> None:
        """Size, plan and every live page are as they were, and the pool is in use."""
        pool, change = self.pool, self.change
        assert (pool.plan, pool.num_pages, pool.failed) == (change.plan, change.pages, None)
        assert pool.nbytes == self.device.live_bytes == change.plan.nbytes(change.pages)
        for (tier, page), held in self.before.items():
            assert page_bytes(pool, tier, page) == held

    def check_rebuilt(self) -> None:
        """New size and plan; pages kept are in their places and all others are zero."""
        pool, change = self.pool, self.change
        assert (pool.plan, pool.num_pages) == (change.after, change.pages_after)
        assert pool.failed is None
        assert pool.nbytes == self.device.live_bytes == change.after.nbytes(change.pages_after)
        for tier in pool.plan.tiers:
            places = {new: old for old, new in change.keep.get(tier.name, {}).items()}
            for page in range(pool.pages(tier.name) + 1):
                if page in places:
                    held = self.before[tier.name, places[page]]
                    assert page_bytes(pool, tier.name, page) == held
                else:
                    assert not any(page_bytes(pool, tier.name, page))

    def check_failed(self, caught: pytest.ExceptionInfo[PoolFailed]) -> None:
        """No memory is held, and every use says why."""
        pool = self.pool
        assert pool.failed is not None
        assert pool.failed in str(caught.value)
        assert pool.nbytes == self.device.live_bytes == 0
        for use in (
            lambda: pool.view("k", 0),
            lambda: pool.view("nothing", 99),
            lambda: pool.copy_page("full", 0, 1),
            lambda: pool.rebuild(1),
        ):
            with pytest.raises(PoolFailed) as again:
                use()
            assert pool.failed in str(again.value)


def steps_of(change: Change) -> list[str]:
    """The steps of a rebuild that nothing disturbs."""
    trial = Trial(change)
    trial.rebuild()
    trial.check_rebuilt()
    return trial.device.steps


@pytest.mark.parametrize("name", CHANGES)
def test_rebuild_keeps_what_it_is_told_to(name: str) -> None:
    trial = Trial(CHANGES[name])
    identity = trial.pool
    trial.rebuild()
    trial.check_rebuilt()
    assert trial.pool is identity
    assert trial.device.freed == [0]  # nothing of the old memory was alive any more


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("name", CHANGES)
def test_a_failure_at_any_step_leaves_the_pool_as_it_was(
    name: str, error: type[BaseException]
) -> None:
    """Staging, trying the way back, allocating, zeroing, copying: each in turn."""
    change = CHANGES[name]
    steps = steps_of(change)
    first_allocation = steps.index("allocate")
    assert {"stage", "write"} == set(steps[:first_allocation])
    raised = {MemoryError: (RebuildRejected, RebuildFailed), KeyboardInterrupt: (error, error)}
    for step in range(len(steps)):
        trial = Trial(change)
        with pytest.raises(raised[error][step >= first_allocation]) as caught:
            trial.rebuild(step, error=error)
        trial.check_as_before()
        untouched = step < first_allocation
        assert trial.device.freed == ([] if untouched else [0, 0])
        if error is MemoryError:
            assert isinstance(caught.value.__cause__, MemoryError)
            assert f"step {step}, {steps[step]}" in str(caught.value)
        trial.rebuild()
        trial.check_rebuilt()


@pytest.mark.parametrize("errors", [(MemoryError,), (KeyboardInterrupt,)])
@pytest.mark.parametrize("name", ["shrink", "another codec"])
def test_a_second_failure_on_the_way_back_latches(
    name: str, errors: tuple[type[BaseException]]
) -> None:
    """Each pair: any step after staging, then any step of the way back."""
    change = CHANGES[name]
    (error,) = errors
    steps = steps_of(change)
    pairs = 0
    for first in range(steps.index("allocate"), len(steps)):
        trial = Trial(change)
        with pytest.raises(RebuildFailed):
            trial.rebuild(first)
        for second in range(first + 1, len(trial.device.steps)):
            trial = Trial(change)
            with pytest.raises(PoolFailed) as caught:
                trial.rebuild(first, second, error=error)
            trial.check_failed(caught)
            assert f"step {first}, " in str(caught.value)
            assert f"step {second}, " in str(caught.value)
            assert isinstance(caught.value.__cause__, error)
            pairs += 1
    assert pairs > 300


def test_between_two_states_the_pool_is_in_neither() -> None:
    """So that no interruption, wherever it strikes, leaves a pool in use without its memory."""
    said = []

    def look() -> None:
        with pytest.raises(PoolFailed) as caught:
            pool.view("k", 1)
        said.append(str(caught.value))
        with pytest.raises(PoolFailed):
            pool.rebuild(2)

    pool = Pool(hybrid(), 3, on_free=look)
    pool.rebuild(5)
    assert len(said) == 1
    assert "a rebuild to 5 pages of 288 bytes was interrupted" in said[0]
    assert pool.failed is None
    assert pool.view("k", 1).lead[0] == 6


def test_freed_memory_that_cannot_be_given_back_counts_as_a_failure() -> None:
    change = CHANGES["grow"]
    calls = []

    def broken_once() -> None:
        calls.append(None)
        if len(calls) == 1:
            raise OSError("the driver is busy")

    pool = Pool(change.plan, change.pages, on_free=broken_once)
    scribble(pool)
    held = page_bytes(pool, "full", 4)
    with pytest.raises(RebuildFailed, match="the driver is busy"):
        pool.rebuild(change.pages_after, live={"full": [4]})
    assert page_bytes(pool, "full", 4) == held
    assert len(calls) == 2


def test_memory_of_the_wrong_kind_is_a_failure_like_any_other() -> None:
    wrong_next = False

    def empty(shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
        nonlocal wrong_next
        shape, wrong_next = shape[1:] if wrong_next else shape, False
        return np.empty(shape, dtype)

    pool = Pool(hybrid(), 3, empty)
    scribble(pool)
    held = page_bytes(pool, "full", 2)
    wrong_next = True
    with pytest.raises(RebuildFailed, match="returned shape"):
        pool.rebuild(5, live={"full": [2]})
    assert page_bytes(pool, "full", 2) == held


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_pages": 0}, "num_pages"),
        ({"num_pages": 2.0}, "num_pages"),
        ({"plan": "mha"}, "plan must be a PoolPlan, or None .*, got 'mha'"),
        ({"plan": [QSA]}, "plan must be a PoolPlan"),
        ({"plan": 0}, "plan must be a PoolPlan"),
        ({"live": [("full", [0])]}, r"live must be a mapping, got \[\('full'"),
        ({"live": "full"}, "live must be a mapping, got 'full'"),
        ({"live": {"full": None}}, "live: tier 'full': pages must be a list of ints, got None"),
        ({"live": {"full": 3}}, "live: tier 'full': pages must be a list of ints, got 3"),
        ({"live": {"full": "01"}}, "page must be an int of at least 0, got '0'"),
        ({"live": {None: [0]}}, "live: no tier None"),
        ({"keep": [0, 1]}, r"keep must be a mapping, got \[0, 1\]"),
        ({"keep": {"full": [0, 1]}}, r"keep: tier 'full' must be a mapping, got \[0, 1\]"),
        ({"keep": {"full": None}}, "keep: tier 'full' must be a mapping, got None"),
        ({"keep": {"full": {0: None}}}, "page must be an int of at least 0, got None"),
        ({"keep": {"full": {True: 1}}}, "page must be an int of at least 0, got True"),
        ({"live": {"full": [5]}}, r"live: tier 'full' has pages 0 … 4, got 5"),
        ({"live": {"full": [-1]}}, "page must be an int of at least 0, got -1"),
        ({"live": {"full": [np.int32(1)]}}, "page must be an int"),
        ({"live": {"ring": [0]}}, "live: no tier 'ring'"),
        ({"live": {"window": [3]}}, r"live: tier 'window' has pages 0 … 2, got 3"),
        ({"keep": {"full": {5: 0}}}, r"keep: tier 'full' has pages 0 … 4, got 5"),
        ({"keep": {"full": {0: 3}}}, r"after the rebuild has pages 0 … 2, got 3"),
        ({"keep": {"full": {0: 1, 2: 1}}}, "two pages of tier 'full' go to the same page"),
        ({"keep": {"ring": {0: 0}}}, "keep: no tier 'ring'"),
        ({"plan": hybrid("q4_0"), "keep": {"full": {0: 0}}}, "'full' is laid out anew"),
        ({"plan": QSA, "keep": {"window": {0: 0}}}, "keep: no tier 'window'"),
        (
            {"plan": hybrid(window_pages=1), "keep": {"window": {2: 1}}},
            r"'window' after the rebuild has pages 0 … 0, got 1",
        ),
    ],
)
def test_what_cannot_be_is_rejected_before_anything_is_touched(
    change: dict[str, Any], words: str
) -> None:
    device = Device()
    pool = device.pool(hybrid(), 5)
    scribble(pool)
    before = {t: [p.copy() for p in planes(pool, t)] for t in ("full", "window")}
    with pytest.raises(RebuildRejected, match=words):
        pool.rebuild(**{"num_pages": 3, **change})
    assert device.steps == device.freed == []
    for tier, old in before.items():
        assert all(map(np.array_equal, planes(pool, tier), old))


@pytest.mark.parametrize("once", [iter, lambda pages: (page for page in pages)])
def test_pages_that_can_be_read_only_once_come_back_too(once: Any) -> None:
    trial, device = Device(), Device()
    trial.pool(hybrid(), 5).rebuild(9, live={"full": [0, 1, 3]})
    pool = device.pool(hybrid(), 5)
    scribble(pool)
    before = {page: page_bytes(pool, "full", page) for page in (0, 1, 3)}
    device.steps.clear()
    device.fail_at = [trial.steps.index("allocate")]
    with pytest.raises(RebuildFailed):
        pool.rebuild(9, live={"full": once([0, 1, 3])})
    assert {page: page_bytes(pool, "full", page) for page in before} == before


def test_a_tier_with_another_window_keeps_nothing_though_its_rows_are_alike() -> None:
    plan = hybrid()
    full, window = plan.tiers
    wider = PoolPlan(4, (full, type(window)("window", window.slabs, 9, fixed_pages=3)))
    pool = Pool(plan, 3)
    with pytest.raises(RebuildRejected, match="'window' is laid out anew"):
        pool.rebuild(3, plan=wider, keep={"window": {0: 0}})
    pool.rebuild(3, plan=wider, keep={"full": {0: 0}})
    assert pool.plan is wider


def test_p014_lifecycle_scales_live_in_the_pool_and_come_back_with_their_codes() -> None:
    """Free, allocate anew, restore: rows decode as before, for every codec with its scales."""
    for name in kvq_codecs.names():
        codec, s = kvq_codecs.get(name), spec(name)
        plan = FAMILIES["mha"].make(s, 128, 16)
        pool = Pool(plan, 4)
        rows = np.random.default_rng(1).standard_normal((2, 2, 16, 128)).astype(np.float32)
        for plane, values in codec.encode(rows).planes.items():
            pool.view("k", 4).planes[plane][[1, 3]] = values
        before = codec.decode(pool.view("k", 4))
        assert pool.view("k", 4).planes.keys() == {p.name for p in s.planes}
        pool.rebuild(4, keep={"full": {1: 1, 3: 3}})
        after = codec.decode(pool.view("k", 4))
        assert np.array_equal(after, before)
        assert np.any(after[3])


@pytest.mark.parametrize("family", ["hybrid_swa", "mla", "dsa", "qsa"])
def test_f43_lifecycle_rows_beyond_the_old_size_in_every_tier_after_growing(family: str) -> None:
    """Index rows too: a tier left at its old size would be read out of bounds."""
    pool = Pool(FAMILIES[family].make(spec("q8_0"), 64, 4), 2)
    rng = np.random.default_rng(2)

    def write_and_read_the_last_pages() -> None:
        for tier in pool.plan.tiers:
            last = pool.pages(tier.name) - 1
            for slab in tier.slabs:
                codec = kvq_codecs.get(slab.spec.name)
                for layer in slab.layers:
                    view = pool.view(slab.name, layer)
                    rows = rng.standard_normal((*view.lead[1:], slab.dim)).astype(np.float32)
                    encoded = codec.encode(rows)
                    for plane, array in view.planes.items():
                        array[last] = encoded.planes[plane]
                    back = codec.decode(view.map(itemgetter(last)))
                    assert np.array_equal(back, codec.decode(encoded))

    for pages in (9, 3):
        pool.rebuild(pages)
        assert pool.nbytes == pool.plan.nbytes(pages)
        for tier in pool.plan.tiers:
            rows = {plane.shape[0] for plane in planes(pool, tier.name)}
            assert rows == {tier.pages(pages) + 1}
        write_and_read_the_last_pages()
