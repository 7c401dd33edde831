"""Few sizes, little waste, never more than the bound: pure arithmetic."""

from __future__ import annotations

import pytest

from kvq_attention.triton.extending import portions
from kvq_attention.triton.extending.portions import GRAIN, Sizes

MIB = 1 << 20
PASTS = (*range(3 * GRAIN), 8192, 10_000, 65_535, 131_072)


def test_rows_are_padded_little_and_to_few_sizes() -> None:
    sizes = [portions.padded(rows) for rows in range(1, 16_385)]
    for rows, size in enumerate(sizes, 1):
        assert rows <= size < rows + max(GRAIN, rows / 16 + 1) and size % GRAIN == 0
    assert len(set(sizes)) <= 16 + 3 * 16
    assert portions.padded(2048) == 2048 and portions.padded(8192) == 8192


@pytest.mark.parametrize("share", [GRAIN, 7 * GRAIN, 8192, 16_384])
def test_parts_and_what_is_before_the_own_rows_are_the_past(share: int) -> None:
    sizes = set()
    for past in PASTS:
        end = 0
        for low, high in portions.parts(past, share):
            assert low == end and 0 < high - low <= share
            end = high
            sizes.add(high - low)
        before = portions.before(past)
        assert end + before == past and 0 <= before < GRAIN
        assert portions.count(past, share) == len(list(portions.parts(past, share)))
    assert len(sizes) <= 24
    if share >= 8192:
        assert len(list(portions.parts(8192, share))) == 1
        assert len(list(portions.parts(10_000, share))) == 2


@pytest.mark.parametrize("bound", [MIB // 2, MIB, 8 * MIB, 128 * MIB])
def test_a_plan_stays_within_its_bound(bound: int) -> None:
    sizes = Sizes(dim=128, group=4)
    most = sizes.most_queries(bound)
    assert (most > 0) == (bound >= MIB)
    for past in PASTS:
        for queries in (1, most // 2, most) if most else ():
            plan = sizes.plan(queries, past, 8, bound)
            assert plan.nbytes <= bound and 8 % plan.heads == 0
            assert plan.rows >= portions.before(past) + queries
            assert (plan.share > 0) == (past >= GRAIN)
    # one more could need another grain of rows, for which there is no room
    rows = portions.padded(most + GRAIN)
    assert rows * sizes.row_bytes + GRAIN * sizes.token_bytes > bound


def test_all_heads_at_once_where_there_is_room() -> None:
    plan = Sizes(128, 4).plan(2048, 8192, 8, 128 * MIB)
    assert (plan.heads, plan.rows, plan.share) == (8, 2048, 8192)
