"""How many pages memory allows, and what is said when it allows none."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pool_cases import spec, tiny_hybrid

from kvq_pools import Budget, BudgetError, PoolPlan, mha, smallest

GB, MIB = 10**9, 2**20


def plan_of(layers: int = 10, page_tokens: int = 16) -> PoolPlan:
    s = spec("q4_0")
    return mha(layers=range(layers), kv_heads=2, head_dim=256, k=s, v=s, page_tokens=page_tokens)


def test_the_formula_term_by_term() -> None:
    budget = Budget(1000, 700, 0.9, other_pools_bytes=50, workspace_bytes=20)
    assert budget.weights_bytes == 300
    assert budget.available_bytes == 900 - 300 - 50 - 20
    assert budget.largest_bytes == 700 - 50 - 20


@given(
    before=st.integers(0, 200 * 10**9),
    loaded=st.floats(0, 1),
    ratio=st.floats(0.01, 1),
    others=st.integers(0, 10**9),
    workspace=st.integers(0, 10**9),
)
def test_f39_capacity_weights_workspace_and_pool_stay_within_their_share(
    before: int, loaded: float, ratio: float, others: int, workspace: int
) -> None:
    """What is captured or computed beside the pool is priced, and so is the padding page."""
    plan = tiny_hybrid(window=40, page_tokens=16, window_pages=12)
    budget = Budget(before, int(before * (1 - loaded)), ratio, others, workspace)
    beside = budget.weights_bytes + others + workspace
    share = int(ratio * before)
    try:
        pages = budget.pages(plan)
    except BudgetError:
        assert beside + plan.nbytes(2) > share
        return
    assert pages >= 2
    assert beside + plan.nbytes(pages) <= share < beside + plan.nbytes(pages + 1)
    assert budget.obey(plan, num_pages=pages) == pages  # memory_ratio leaves no less than is free


def test_f33_capacity_the_workspace_of_the_attention_is_in_the_budget() -> None:
    """A card of 6 GB at a ratio of 0.95, 256 MiB of workspace."""
    plan = plan_of()
    without = Budget(6 * GB, 2 * GB, 0.95)
    budget = Budget(6 * GB, 2 * GB, 0.95, workspace_bytes=256 * MIB)
    pages = budget.pages(plan)
    assert 4 * GB + 256 * MIB + plan.nbytes(pages) <= 5_700_000_000
    assert without.pages(plan) - pages in (2912, 2913)  # 256 MiB of pages of 92,160 bytes


def test_f37_capacity_a_negative_budget_has_words_of_its_own() -> None:
    """Weights of 7.2 of 8 GB, a ratio of 0.8: what helps is not a smaller cache."""
    budget = Budget(8 * GB, 800_000_000, 0.8, workspace_bytes=100_000_000)
    assert budget.available_bytes == -900_000_000
    with pytest.raises(BudgetError) as caught:
        budget.pages(plan_of())
    said = str(caught.value)
    for part in (
        "900,000,000 bytes are missing",
        "0.8 of the 8,000,000,000 bytes free before loading",
        "7,200,000,000 of weights",
        "100,000,000 of workspace",
        "raise memory_ratio",
    ):
        assert part in said
    assert "codec" not in said


def test_too_little_for_two_pages_names_every_number() -> None:
    plan = plan_of()
    budget = Budget(GB, GB, 1, workspace_bytes=GB - 3 * plan.page_bytes + 1)
    with pytest.raises(BudgetError) as caught:
        budget.pages(plan)
    said = str(caught.value)
    for number in (plan.nbytes(2), plan.fixed_bytes, plan.page_bytes, budget.available_bytes):
        assert f"{number:,}" in said
    assert "choose a codec of fewer bits" in said
    assert Budget(GB, GB, 1, workspace_bytes=GB - 3 * plan.page_bytes).pages(plan) == 2


def test_f27_capacity_a_size_that_was_asked_for_is_usable_in_full() -> None:
    """Pages of 128 tokens in 60 layers; one more is allocated than N tokens take, and priced."""
    plan = plan_of(layers=60, page_tokens=128)
    exactly = Budget(plan.nbytes(4), plan.nbytes(4), 0.01)
    assert exactly.obey(plan, num_tokens=4 * 128) == 4
    short = Budget(plan.nbytes(4) - 1, plan.nbytes(4) - 1, 1)
    with pytest.raises(BudgetError, match=r"4 pages of 128 .* at most 3 pages, 384 tokens, fit"):
        short.obey(plan, num_tokens=4 * 128)


@pytest.mark.parametrize("field", ["other_pools_bytes", "workspace_bytes"])
def test_a_size_that_was_asked_for_leaves_room_for_the_rest(field: str) -> None:
    plan = plan_of()
    rest: dict[str, Any] = {field: plan.page_bytes}
    budget = Budget(plan.nbytes(4), plan.nbytes(4), 1, **rest)
    assert budget.obey(plan, num_pages=3) == 3
    with pytest.raises(BudgetError) as caught:
        budget.obey(plan, num_pages=4)
    for number in (plan.nbytes(4), plan.nbytes(3), plan.fixed_bytes, plan.page_bytes):
        assert f"{number:,}" in str(caught.value)


def test_more_than_all_memory_is_promised_elsewhere() -> None:
    with pytest.raises(BudgetError, match=r"-1,000,000,000 are free.* at most 0 pages"):
        Budget(GB, GB, 1, other_pools_bytes=2 * GB).obey(plan_of(), num_pages=1)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({}, "either num_tokens or num_pages"),
        ({"num_tokens": 16, "num_pages": 1}, "either num_tokens or num_pages"),
        ({"num_tokens": 40}, "multiple of the 16 tokens of a page, got 40; take 32 or 48"),
        ({"num_tokens": 5}, "got 5; take 16"),
        ({"num_tokens": 0}, "num_tokens must be an int of at least 1"),
        ({"num_pages": 0}, "num_pages must be an int of at least 1"),
        ({"num_pages": 2.0}, "num_pages must be an int of at least 1"),
    ],
)
def test_sizes_that_cannot_be_obeyed(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(BudgetError, match=words):
        Budget(GB, GB, 1).obey(plan_of(), **asked)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"memory_ratio": 0}, "memory_ratio"),
        ({"memory_ratio": 1.01}, "memory_ratio"),
        ({"memory_ratio": float("nan")}, "memory_ratio"),
        ({"memory_ratio": "0.9"}, "memory_ratio must be a number .*, got '0.9'"),
        ({"memory_ratio": True}, "memory_ratio must be a number .*, got True"),
        ({"memory_ratio": None}, "memory_ratio must be a number .*, got None"),
        ({"memory_ratio": [0.9]}, "memory_ratio must be a number"),
        ({"memory_ratio": 0.9j}, "memory_ratio must be a number"),
        ({"free_before_bytes": -1}, "free_before_bytes"),
        ({"free_after_bytes": 1.5}, "free_after_bytes"),
        ({"workspace_bytes": None}, "workspace_bytes"),
        ({"other_pools_bytes": True}, "other_pools_bytes"),
    ],
)
def test_budgets_that_cannot_be(change: dict[str, Any], words: str) -> None:
    good = {"free_before_bytes": GB, "free_after_bytes": GB, "memory_ratio": 0.9}
    with pytest.raises(BudgetError, match=words):
        Budget(**(good | change))


def test_one_page_is_obeyed_and_never_chosen() -> None:
    plan = plan_of()
    room = Budget(plan.nbytes(1), plan.nbytes(1), 1)
    assert room.obey(plan, num_pages=1) == room.obey(plan, num_tokens=plan.page_tokens) == 1
    with pytest.raises(BudgetError, match="the smallest cache needs"):
        room.pages(plan)


def test_the_smallest_rank_decides() -> None:
    plan = plan_of()
    ranks = [Budget(GB, GB - taken, 0.9) for taken in (0, 5 * 10**8, 10**8)]
    assert smallest(ranks, plan) == ranks[1].pages(plan) < ranks[2].pages(plan)
    with pytest.raises(BudgetError, match="rank 1 of 2: nothing is left for the cache"):
        smallest([ranks[0], Budget(GB, 0, 0.9)], plan)
    with pytest.raises(BudgetError, match="at least of one"):
        smallest([], plan)
