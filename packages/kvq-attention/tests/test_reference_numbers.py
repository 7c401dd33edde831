"""What must not move the numbers of the reference, and finite numbers that must stay finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvq_attention import ops, reference
from kvq_codecs import Encoded

from .oracle import relative_error
from .scene import TIER, Geometry, Scene, assert_same_bytes, build, put
from .tolerances import OUTPUT, REORDERED

every_op = pytest.mark.parametrize("op", ["decode", "extend"])

# A request of one query and one of many, on pages of 16.
LENGTHS, QUERIES = (17, 40), (1, 24)


def scene_of(op: str, device: str = "cpu", **shape: Any) -> Scene:
    shape = {"k": "fp32", "heads": 4, "lengths": LENGTHS, "queries": QUERIES, **shape}
    return build(Geometry(**shape), device, stored_queries=op == "decode")


def attend(
    op: str, scene: Scene, lowered: torch.dtype | None = None, **scoring: Any
) -> torch.Tensor:
    """The op's output; `lowered`: the dtype of the autocast around it."""
    fresh = scene.fresh() if op == "extend" else ()
    given = scene.q, *fresh, *scene.caches, scene.batch(), TIER
    device = scene.q.device.type
    with torch.autocast(device, dtype=lowered, enabled=lowered is not None):
        out: torch.Tensor = getattr(ops, op)(
            *given, backend="reference", **{"scale": scene.scale, **scoring}
        )
        assert torch.is_autocast_enabled(device) == (lowered is not None), "as it was before"
    return out


def rewrite(op: str, scene: Scene, change: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    """Change each request's raw K and V in place, and what the cache holds of them."""
    for r, (length, count) in enumerate(zip(LENGTHS, QUERIES, strict=True)):
        change(scene.ks[r], scene.vs[r])
        held = length if op == "decode" else length - count
        for cache, rows in zip(scene.caches, (scene.ks[r], scene.vs[r]), strict=True):
            put(cache, rows[:held], scene.slots(r, 0, held))


@every_op
@pytest.mark.parametrize("codec", ["fp32", "q4_0", "iso4"])
@pytest.mark.parametrize("lowered", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_does_not_move_attention(
    op: str, codec: str, lowered: torch.dtype, device: str
) -> None:
    scoring: dict[str, Any] = {"softcap": 5.0, "sinks": torch.ones(4, device=device)}
    for dtype in (torch.float32, torch.bfloat16):
        scene = scene_of(op, device, k=codec, dim=128, dtype=dtype)
        assert torch.equal(attend(op, scene, lowered, **scoring), attend(op, scene, **scoring))


@pytest.mark.parametrize("codec", ["bf16", "q8_0", "iso4"])
def test_autocast_does_not_move_what_is_stored(codec: str, device: str) -> None:
    scene = scene_of("decode", device, k=codec, dim=128)
    slots = scene.batch().tables[TIER].slot_mapping
    caches: list[tuple[Encoded, Encoded]] = []
    for enabled in (False, True):
        k_cache, v_cache = (cache.map(torch.zeros_like) for cache in scene.caches)
        k, v = scene.fresh()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=enabled):
            ops.store(k, v, k_cache, v_cache, slots, backend="reference")
        caches.append((k_cache, v_cache))
    for got, wanted in zip(*caches, strict=True):
        assert_same_bytes(got, wanted)


@every_op
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("block_rows", [1, 7, 64])
def test_a_later_token_moves_earlier_ones_by_rounding_at_most(
    op: str, bad: float, block_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "BLOCK_ROWS", block_rows)
    scene = scene_of(op)
    clean = attend(op, scene)

    def spoil(k: torch.Tensor, v: torch.Tensor) -> None:
        k[-1], v[-1] = bad, bad

    rewrite(op, scene, spoil)
    out = attend(op, scene)
    last = torch.tensor(QUERIES).cumsum(0) - 1  # the queries that see the last tokens
    earlier = [row for row in range(len(out)) if row not in last.tolist()]
    assert relative_error(out[earlier], clean[earlier]) <= REORDERED
    assert not torch.isfinite(out[last]).any()


@every_op
@pytest.mark.parametrize("sink", [-1e30, -3.0, 0.0, 100.0, 1e30])
def test_a_finite_sink_takes_all_where_every_score_is_minus_infinity(op: str, sink: float) -> None:
    scene = scene_of(op)
    for q in scene.qs:
        q.abs_()

    def lowest(k: torch.Tensor, _v: torch.Tensor) -> None:
        k[...] = -torch.inf

    rewrite(op, scene, lowest)
    out = attend(op, scene, sinks=torch.full((4,), sink))
    assert torch.equal(out, torch.zeros_like(out))
    assert attend(op, scene).isnan().all(), "without a sink there is nothing to weigh"


@every_op
def test_a_sink_is_exact_where_some_scores_are_minus_infinity(op: str) -> None:
    scene = scene_of(op)
    for q in scene.qs:
        q.abs_()

    def lower_first(k: torch.Tensor, _v: torch.Tensor) -> None:
        k[:10] = -torch.inf

    rewrite(op, scene, lower_first)
    sinks = torch.tensor([-2.0, 0.0, 1.0, 3.0])
    expected = scene.expected(fresh=op == "extend", sinks=sinks)
    assert relative_error(attend(op, scene, sinks=sinks), expected) <= OUTPUT[torch.float32]


@every_op
@pytest.mark.parametrize("codec", ["fp32", "bf16"])
@pytest.mark.parametrize("large", [3e38, -3e38])
def test_a_mean_of_large_values_does_not_overflow(op: str, codec: str, large: float) -> None:
    scene = scene_of(op, k=codec)

    def fill(_k: torch.Tensor, v: torch.Tensor) -> None:
        v[...] = large

    rewrite(op, scene, fill)
    for scoring in ({}, {"sinks": torch.zeros(4)}):
        expected = scene.expected(fresh=op == "extend", **scoring)
        error = relative_error(attend(op, scene, **scoring), expected)
        assert error <= OUTPUT[torch.float32]


@every_op
@pytest.mark.parametrize("softcap", [1.2e-38, 1e-20, 1e20, 3.4e38])
def test_every_softcap_that_is_allowed_gives_the_formula(op: str, softcap: float) -> None:
    scene = scene_of(op)
    expected = scene.expected(fresh=op == "extend", softcap=softcap)
    error = relative_error(attend(op, scene, softcap=softcap), expected)
    assert error <= OUTPUT[torch.float32]
