"""Compressed index keys, the rings of requests and the rows of a step."""

from __future__ import annotations

from typing import Any

import pytest
from pool_cases import spec

from kvq_pools import PlanError, Pool, PoolPlan, heads_per_rank, qsa

GIB = 2**30


def plan_of(codec: str = "fp8", **change: Any) -> PoolPlan:
    """12 layers of 2 KV heads × 256."""
    options: dict[str, Any] = {
        "layers": range(12),
        "kv_heads": 2,
        "head_dim": 256,
        "k": spec(codec),
        "v": spec(codec),
        "index": spec("bf16"),
        "max_requests": 8,
        "max_step_tokens": 1024,
    }
    return qsa(**(options | change))


@pytest.mark.parametrize(
    ("codec", "one_rank", "one_of_two"),
    [("bf16", 25_344, 13_056), ("fp8", 13_248, 7_008), ("nvfp4", 7_872, 4_320)],
)
def test_price_of_a_token(codec: str, one_rank: int, one_of_two: int) -> None:
    """The index is replicated on every rank."""
    assert plan_of(codec).token_bytes == one_rank
    assert plan_of(codec, kv_heads=heads_per_rank(2, 2)).token_bytes == one_of_two
    assert plan_of(codec, kv_heads=heads_per_rank(2, 4)).token_bytes == one_of_two


@pytest.mark.parametrize(
    ("codec", "ranks", "tokens", "gib"),
    [
        ("fp8", 1, 524_480, 6.47),
        ("fp8", 2, 2_097_152, 13.69),
        ("nvfp4", 2, 2_097_152, 8.44),
    ],
)
def test_size_of_a_rank(codec: str, ranks: int, tokens: int, gib: float) -> None:
    plan = plan_of(codec, kv_heads=heads_per_rank(2, ranks))
    assert round((plan.nbytes(tokens // 64) - plan.fixed_bytes) / GIB, 2) == gib


def test_tiers_of_positions_of_requests_and_of_steps() -> None:
    plan = plan_of()
    assert [(t.name, t.scope, t.fixed_pages, t.slots(64)) for t in plan.tiers] == [
        ("full", "position", None, 64),
        ("ring", "request", 8, 4),
        ("scratch", "step", 1024, 1),
    ]
    index_row = 12 * 128 * 2
    assert plan.tier_bytes("ring", 5) == (8 + 1) * 4 * index_row
    assert plan.tier_bytes("scratch", 5) == (1024 + 1) * index_row
    assert plan.tier_bytes("full", 5) == (5 + 1) * 64 * 13_248
    assert plan.token_bytes_by_tier == {"full": 13_248}
    assert plan.granularity == 4


@pytest.mark.parametrize(
    ("ratio", "draft", "slots"), [(4, 0, 4), (4, 1, 8), (4, 4, 8), (4, 5, 12), (2, 3, 6), (1, 0, 1)]
)
def test_a_ring_has_whole_groups_that_hold_the_drafts(ratio: int, draft: int, slots: int) -> None:
    ring = plan_of(ratio=ratio, draft_tokens=draft).tier("ring")
    assert ring.slots(64) == slots


def test_index_ring_and_scratch_stay_as_they_are_whatever_k_and_v_are() -> None:
    pool = Pool(plan_of("nvfp4", layers=(2, 5), max_step_tokens=3), 2)
    assert pool.view("k", 5).shape == (3, 2, 64, 256)
    assert pool.view("index_k", 5).shape == (3, 1, 16, 128)
    assert pool.view("index_pending", 5).shape == (9, 1, 4, 128)
    assert pool.view("index_scratch", 5).shape == (4, 1, 1, 128)
    for slab in ("index_k", "index_pending", "index_scratch"):
        assert pool.view(slab, 2).spec is spec("bf16")
    with pytest.raises(KeyError, match=r"layer 3\b"):
        pool.view("index_pending", 3)


def test_keys_and_values_may_have_a_layout_by_layer() -> None:
    plan = plan_of(layers=(0, 1), k={0: spec("bf16"), 1: spec("q4_0")})
    assert plan.token_bytes == 2 * (512 + 144 + 2 * 260) + 2 * 64
    assert plan.slab("index_k", 1).layers == (0, 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"index": spec("fp8")}, "bf16 or fp16, got fp8; index keys are never quantized"),
        ({"page_tokens": 1}, "page_tokens 1 is not a multiple of the 4 slots .* 'index_k'"),
        ({"page_tokens": 66}, "page_tokens 66 is not a multiple of the 4"),
        ({"max_requests": 0}, "max_requests"),
        ({"max_step_tokens": 0}, "max_step_tokens"),
        ({"ratio": 0}, "ratio"),
        ({"draft_tokens": -1}, "draft_tokens"),
        ({"model_layers": 11}, r"\[11\] are beyond"),
        ({"layers": 12}, "layers must be global layer ids"),
    ],
)
def test_plans_that_cannot_be(change: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        plan_of(**change)
