"""How an extend reads the past, and how a scratch is used: without a kernel."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from kvq_attention import launches
from kvq_attention.errors import AttentionError
from kvq_attention.routes import Route
from kvq_attention.triton.extending import dense, launch, portions, routes, scratch

from ..decode.places import INTERPRETED, Place, each_place
from .cases import extend, scene_of

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


@pytest.mark.parametrize(
    ("queries", "known", "bound", "counted"),
    [
        ((1, 1), True, 128 * MIB, {"loop"}),
        ((1, 12), False, 128 * MIB, {"loop", "scratch"}),
        ((1, 12), False, 0, {"loop"}),
        ((1, 12), True, 128 * MIB, {"loop", "dense (flash_for_cpu)"}),
        ((12, 12), True, 128 * MIB, {"dense (flash_for_cpu)"}),
        ((12, 40), True, 1 << 17, {"dense (flash_for_cpu)", "scratch"}),
    ],
)
@each_place([INTERPRETED])
def test_the_routes_that_a_step_takes_are_counted(
    queries: tuple[int, int],
    known: bool,
    bound: int,
    counted: set[str],
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routes, "BREAK_EVEN", 24)
    monkeypatch.setattr(dense, "FEWEST_PRODUCTS", 400 * 4 * 128)
    monkeypatch.setattr(portions, "GRAIN", 16)
    for module, name in (
        (launch, "extend_within"),
        (launch, "extend_through"),
        (dense, "extend_densely"),
    ):
        monkeypatch.setattr(module, name, lambda *_, **__: None)
    scene = scene_of(
        place, "q8_0", lengths=(40, 210), queries=queries, heads=4, kv_heads=2, dim=128
    )
    batch = scene.batch()
    before = launches.routes()
    host = tuple(batch.requests()) if known else None
    extend(place, scene, batch=replace(batch, host=host), scratch_bytes=bound)
    taken = {key: n for key, n in launches.routes().items() if n != before.get(key, 0)}
    assert taken.keys() == {("triton", "extend", route) for route in counted}


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


@pytest.mark.parametrize("rows", [0, -1, True, 2.0, None])
def test_a_route_has_rows(rows: Any) -> None:
    with pytest.raises(AttentionError, match="rows must be an int of at least 1"):
        Route("loop", rows)
