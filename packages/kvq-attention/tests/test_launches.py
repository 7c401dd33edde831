"""Launches are counted per backend and op, by whoever launches."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvq_attention import launches, ops, support

from .scene import TIER, Geometry, build


def test_every_backend_and_op_is_counted_from_zero() -> None:
    with launches.counting() as launched:
        pass
    nothing = dict.fromkeys(support.OPS, 0)
    assert launched == dict.fromkeys(support.BACKENDS, nothing)
    assert launches.counts().keys() == launched.keys()


def test_the_reference_counts_its_ops() -> None:
    scene = build(Geometry(), stored_queries=True)
    k, v = scene.fresh()
    batch = scene.batch()
    with launches.counting() as launched:
        ops.store(k, v, *scene.caches, batch.tables[TIER].slot_mapping)
        ops.store(k[:0], v[:0], *scene.caches, torch.empty(0, dtype=torch.int64))
        for _ in range(2):
            ops.decode(scene.q, *scene.caches, batch, TIER, scale=1.0)
        ops.extend(scene.q, k, v, *scene.caches, batch, TIER, scale=1.0)
    ran = {op: n for op, n in launched["reference"].items() if n}
    assert ran == {"store": 1, "decode": 2, "extend": 1}
    assert not any(any(ran.values()) for name, ran in launched.items() if name != "reference")


def test_blocks_nest_and_count_what_failed() -> None:
    with launches.counting() as outer:
        launches.record("reference", "store")
        with pytest.raises(RuntimeError), launches.counting() as inner:
            launches.record("reference", "store")
            raise RuntimeError
    assert inner["reference"]["store"] == 1
    assert outer["reference"]["store"] == 2


def test_threads_lose_no_count() -> None:
    with launches.counting() as launched, ThreadPoolExecutor(8) as threads:
        for _ in threads.map(lambda _: launches.record("reference", "decode"), range(4000)):
            pass
    assert launched["reference"]["decode"] == 4000


def test_routes_are_counted_beside_launches() -> None:
    """By their names; an op that was never launched by one has none."""
    assert not any(op == "route" for _, op, _ in launches.routes())
    with launches.counting() as launched:
        for route in ("a", "b", "a"):
            launches.record_route("triton", "route", route)
    found = {route: n for (_, op, route), n in launches.routes().items() if op == "route"}
    assert found == {"a": 2, "b": 1}
    assert not any(launched["triton"].values())
