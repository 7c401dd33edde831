"""How an extend reads the past, and how a scratch is used: without a kernel."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from kvq_attention.triton.extending import routes, scratch

MIB = 1 << 20
STEP: dict[str, Any] = {
    "num_tokens": 2048,
    "requests": 1,
    "kv_heads": 8,
    "group": 4,
    "visible": 8192,
    "tile": 64,
    "scratch_bytes": 128 * MIB,
    "break_even": routes.BREAK_EVEN,
}


def choose(
    k: str = "q4_0", v: str = "q4_0", dims: tuple[int, int] = (128, 128), **change: Any
) -> Any:
    return routes.choose((k, v), dims, **{**STEP, **change})


def test_long_chunks_go_through_a_scratch_and_short_ones_do_not() -> None:
    least = routes.BREAK_EVEN // STEP["group"]
    assert choose(num_tokens=least).plan is not None
    assert choose(num_tokens=least - 1) == routes.Route()
    assert choose(num_tokens=least, group=1) == routes.Route()
    # as many requests as could have so many rows each
    assert choose(requests=64).requests == 2048 * 4 // routes.BREAK_EVEN


@pytest.mark.parametrize(
    "change", [{"scratch_bytes": 0}, {"visible": 0}, {"k": "bf16", "v": "fp16"}]
)
def test_without_room_or_anything_to_decode_there_is_no_scratch(change: dict[str, Any]) -> None:
    assert choose(**change) == routes.Route()


def test_a_plain_side_takes_no_room() -> None:
    both, one = choose(), choose(v="bf16")
    assert one.plan.nbytes * 2 == both.plan.nbytes
    assert routes.packed(("q4_0", "bf16")) == (True, False)


def test_a_route_is_told_in_words() -> None:
    assert str(routes.Route()) == "decoded within the loop"
    assert str(choose()) == (
        "decoded within the loop below 2048 query rows, else through a scratch of 33,562,624 "
        "bytes: 8 heads, 8,192 tokens at a time"
    )


@pytest.mark.parametrize("bound", [MIB // 2, MIB, 8 * MIB, 128 * MIB, 1024 * MIB])
@pytest.mark.parametrize("visible", [1, 64, 8192, 65536, 1 << 20])
@pytest.mark.parametrize("requests", [1, 3])
def test_a_plan_covers_the_past_within_its_bound(bound: int, visible: int, requests: int) -> None:
    for rows, dims in product((1, 8192), ((64,), (128, 128), (256, 64))):
        plan = scratch.plan(rows, 128, requests, 8, dims, visible, 64, bound)
        least = requests * (scratch.LEAST_SHARE // 64) * scratch.tile_bytes(dims, 64)
        if plan is None:
            assert rows * 130 * 4 + least > bound
            continue
        assert plan.nbytes <= bound and plan.share % 64 == 0
        assert (plan.parts - 1) * plan.share < visible <= plan.parts * plan.share
        assert plan.parts == 1 or plan.heads == 1
        kept = rows * 130 * 4 if plan.parts > 1 else 0
        taken = requests * plan.heads * (plan.share // 64) * scratch.tile_bytes(dims, 64)
        assert plan.nbytes == kept + taken


def test_64k_tokens_fit_into_8_mib() -> None:
    plan = choose(visible=65536, scratch_bytes=8 * MIB).plan
    assert plan.heads == 1 and plan.parts == 9 and plan.nbytes <= 8 * MIB
