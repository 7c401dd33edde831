"""Prices against published figures, and what a plan refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pool_cases import HEAD_DIMS, PRICES, spec

import kvq_codecs
from kvq_codecs import RowError
from kvq_pools import PageError, PlanError, PoolPlan, Slab, Tier, mha
from kvq_pools.nodes import root_key

GIB = 2**30


def one_tier(*slabs: Slab, page_tokens: int = 64) -> PoolPlan:
    return PoolPlan(page_tokens, (Tier("full", slabs),))


def hybrid_35b(codec: str) -> PoolPlan:
    """40 layers of which every fourth has attention, 2 KV heads × 256."""
    s = spec(codec)
    layers = range(3, 40, 4)
    return mha(layers=layers, kv_heads=2, head_dim=256, k=s, v=s, page_tokens=16, model_layers=40)


@pytest.mark.parametrize(
    ("codec", "at_64", "at_128", "at_256"),
    [
        ("bf16", 128, 256, 512),
        ("fp16", 128, 256, 512),
        ("q8_0", 68, 136, 272),
        ("fp8_e4m3", 68, 136, 272),
        ("fp8", 68, 132, 260),
        ("q6_0", 52, 104, 208),
        ("nvfp4", 40, 76, 148),
        ("q4_0", 36, 72, 144),
        ("iso4", None, 66, 132),
        ("iso3", None, 50, 100),
    ],
)
def test_price_of_one_head_vector(codec: str, at_64: int | None, at_128: int, at_256: int) -> None:
    for dim, price in ((64, at_64), (128, at_128), (256, at_256)):
        if price is None:
            with pytest.raises(RowError):
                Slab("k", spec(codec), (0,), 1, dim)
        else:
            assert one_tier(Slab("k", spec(codec), (0,), 1, dim)).token_bytes == price


@pytest.mark.parametrize(
    ("codec", "price"),
    [
        ("bf16", 20_480),
        ("q8_0", 10_880),
        ("fp8", 10_400),
        ("q6_0", 8_320),
        ("nvfp4", 5_920),
        ("q4_0", 5_760),
        ("iso4", 5_280),
        ("iso3", 4_000),
    ],
)
def test_price_of_a_token_in_a_hybrid_of_ten_attention_layers(codec: str, price: int) -> None:
    assert hybrid_35b(codec).token_bytes == price


def test_price_of_iso4_counts_no_dead_bytes_of_the_interchange_block() -> None:
    assert 10 * 2 * 2 * spec("iso4").block_bytes(256) == 5_440
    assert hybrid_35b("iso4").token_bytes == 5_280


def test_f61_freetoken_the_table_of_160k_tokens_is_computed_from_bytes() -> None:
    """A table kept by hand showed 220,000 tokens' 1.18 GiB for 160,000, and q6_0's as q8_0's."""

    def gib(codec: str, tokens: int) -> float:
        plan = hybrid_35b(codec)
        return round((plan.nbytes(tokens // 16) - plan.fixed_bytes) / GIB, 2)

    published = {"q4_0": 0.86, "q6_0": 1.24, "q8_0": 1.62, "bf16": 3.05}
    assert {codec: gib(codec, 160_000) for codec in published} == published
    assert gib("q4_0", 220_000) == 1.18


@pytest.mark.parametrize("codec", PRICES)
def test_refusal_names_codec_width_and_divisor(codec: str) -> None:
    divisor, price = PRICES[codec]
    for dim in HEAD_DIMS:
        if dim % divisor:
            with pytest.raises(RowError, match=rf"{codec}\b.*\b{dim}\b.*\b{divisor}\b"):
                Slab("k", spec(codec), (0,), 1, dim)
        else:
            assert Slab("k", spec(codec), (0,), 1, dim).page_bytes(16) == 16 * price(dim)


def test_fixed_tier_and_padding_pages_are_priced() -> None:
    full, few = Slab("k", spec("fp8"), (0, 1), 3, 60), Slab("k", spec("q4_0"), (2,), 3, 64)
    plan = PoolPlan(16, (Tier("full", (full,)), Tier("window", (few,), 10, fixed_pages=7)))
    page, window_page = 2 * 3 * 16 * 64, 3 * 16 * 36
    assert plan.page_bytes == page
    assert plan.fixed_bytes == page + 8 * window_page
    assert plan.nbytes(5) == 6 * page + 8 * window_page


def test_pages_of_requests_and_of_steps_have_sizes_of_their_own() -> None:
    def slab(name: str, slots_per_row: int = 1) -> Slab:
        return Slab(name, spec("bf16"), (0, 1), 1, 8, slots_per_row)

    plan = PoolPlan(
        12,
        (
            Tier("full", (slab("k"), slab("index_k", 4)), window=30),
            Tier("window", (slab("v", 6),), window=5, fixed_pages=3),
            Tier("ring", (slab("last", 5),), fixed_pages=2, scope="request", page_slots=10),
            Tier("rows", (slab("row"),), fixed_pages=2, scope="step"),
        ),
    )
    row = 2 * 8 * 2  # of both layers
    assert [t.slots(12) for t in plan.tiers] == [12, 12, 10, 12]
    assert {t.name: plan.tier_bytes(t.name, 7) for t in plan.tiers} == {
        "full": (7 + 1) * (12 + 3) * row,
        "window": (3 + 1) * 2 * row,
        "ring": (2 + 1) * 2 * row,
        "rows": (2 + 1) * 12 * row,
    }
    assert plan.nbytes(7) == sum(plan.tier_bytes(t.name, 7) for t in plan.tiers)
    assert plan.token_bytes_by_tier == {"full": 15 * row / 12, "window": 2 * row / 12}
    assert plan.granularity == 12  # of 4 and 6; the ring's 5 are no positions
    with pytest.raises(KeyError, match="scratch"):
        plan.tier_bytes("scratch", 7)
    with pytest.raises(PageError, match="pages"):
        plan.tier_bytes("full", -1)


@given(budget=st.integers(0, 2**45), fixed=st.integers(1, 2**20))
def test_pages_for_a_budget_are_the_most_that_fit(budget: int, fixed: int) -> None:
    grows = Tier("full", (Slab("k", spec("q6_0"), tuple(range(60)), 8, 128),))
    stays = Tier("window", (Slab("k", spec("q6_0"), (60,), 8, 128),), 99, fixed_pages=fixed)
    plan = PoolPlan(128, (grows, stays))
    pages = plan.pages_for(budget)
    assert plan.nbytes(pages + 1) > budget
    assert pages == 0 or plan.nbytes(pages) <= budget


def test_layers_map_to_their_place_in_the_buffers() -> None:
    slab = Slab("k", spec("fp32"), (7, 3, 11), 1, 4)
    assert [slab.dense(layer) for layer in (3, 7, 11)] == [1, 0, 2]
    with pytest.raises(KeyError, match=r"layer 4\b.*\[7, 3, 11\]"):
        slab.dense(4)


def test_lookups_by_name_and_layer() -> None:
    early, late = Slab("k", spec("bf16"), (0, 1), 1, 64), Slab("k", spec("q4_0"), (2, 4), 1, 64)
    other = Slab("k", spec("q8_0"), (3,), 1, 64)
    plan = PoolPlan(16, (Tier("full", (early, late)), Tier("window", (other,), 8, 2)))
    assert plan.slab("k", 1) is early
    assert plan.slab("k", 4) is late
    assert plan.tier_of(4).name == "full"
    assert plan.tier_of(3) is plan.tier("window")
    for missing in (
        lambda: plan.slab("k", 5),
        lambda: plan.slab("v", 0),
        lambda: plan.tier_of(5),
        lambda: plan.tier("ring"),
    ):
        with pytest.raises(KeyError):
            missing()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": ""}, "name"),
        ({"layers": ()}, "no layer"),
        ({"layers": (0, 1, 0)}, "twice"),
        ({"layers": (-1,)}, "layer id"),
        ({"heads": 0}, "heads"),
        ({"heads": 2.0}, "heads"),
        ({"slots_per_row": 0}, "slots_per_row"),
        ({"dim": 0}, "dim"),
        ({"dim": -64}, "dim"),
        ({"dim": True}, "dim must be an int"),
        ({"dim": 64.0}, "dim must be an int"),
        ({"dim": np.int64(64)}, r"dim must be an int of at least 1, got np.int64\(64\)"),
        ({"name": 5}, "name, a str that is not empty, got 5"),
        ({"name": None}, "name"),
        ({"layers": 3}, "layers must be a tuple of int, got 3"),
        ({"layers": "01"}, "layers must be a tuple of int, got '01'"),
        ({"layers": {0: 1}}, "layers must be a tuple of int"),
        ({"layers": None}, "layers must be a tuple of int"),
        ({"layers": [np.int64(1)]}, "layers must be a tuple of int"),
        ({"layers": [True]}, "layer id"),
        ({"spec": kvq_codecs.get("q8_0")}, "layout must be a kvq_codecs.Spec"),
    ],
)
def test_slabs_that_cannot_be(change: dict[str, object], words: str) -> None:
    good = {"name": "k", "spec": spec("q8_0"), "layers": (0,), "heads": 1, "dim": 64}
    with pytest.raises(PlanError, match=words):
        Slab(**(good | change))  # type: ignore[arg-type]


def test_tiers_and_plans_that_cannot_be() -> None:
    k, again = Slab("k", spec("q8_0"), (0, 1), 1, 64), Slab("k", spec("q4_0"), (1, 2), 1, 64)
    full = Tier("full", (k,))
    shared = Tier("full", (Slab("index_k", spec("bf16"), (0,), 1, 64, slots_per_row=4),))
    for words, bad in {
        "at least one slab": lambda: Tier("full", ()),
        "a tier needs a name, .* got ''": lambda: Tier("", (k,)),
        "a tier needs a name, .* got 7": lambda: Tier(7, (k,)),  # type: ignore[arg-type]
        "slabs must be a tuple of Slab, got Slab": lambda: Tier("full", k),  # type: ignore[arg-type]
        "slabs must be a tuple of Slab, got 'k'": lambda: Tier("full", ("k",)),  # type: ignore[arg-type]
        "tiers must be a tuple of Tier, got Tier": lambda: PoolPlan(16, full),  # type: ignore[arg-type]
        "tiers must be a tuple of Tier, got Slab": lambda: PoolPlan(16, (full, k)),  # type: ignore[arg-type]
        "tiers must be a tuple of Tier, got None": lambda: PoolPlan(16, None),  # type: ignore[arg-type]
        "window": lambda: Tier("full", (k,), window=0),
        "fixed_pages": lambda: Tier("full", (k,), fixed_pages=0),
        "page_tokens": lambda: PoolPlan(0, (full,)),
        "no tier": lambda: PoolPlan(16, ()),
        "grows": lambda: PoolPlan(16, (Tier("window", (k,), 8, fixed_pages=4),)),
        "different names": lambda: PoolPlan(16, (full, Tier("full", (again,)))),
        "'k' of layer 1 .*'full'.*'window'": lambda: PoolPlan(16, (full, Tier("window", (again,)))),
        "'k' of layer 1 .*'both'.*'both'": lambda: PoolPlan(16, (Tier("both", (k, again)),)),
        "page_tokens 30 is not a multiple of the 4": lambda: PoolPlan(30, (shared,)),
        "page_slots 6 is not a multiple of the 4": lambda: PoolPlan(
            16, (full, Tier("ring", shared.slabs, fixed_pages=1, scope="request", page_slots=6))
        ),
        "page_slots must be": lambda: Tier(
            "ring", (k,), fixed_pages=1, scope="request", page_slots=0
        ),
        "page_slots is 8, yet pages of positions": lambda: Tier("full", (k,), page_slots=8),
        "one of position, request, step, got 'token'": lambda: Tier("full", (k,), scope="token"),  # type: ignore[arg-type]
        "'request' needs fixed_pages": lambda: Tier("ring", (k,), scope="request"),
        "'step' needs .* no window": lambda: Tier("s", (k,), 8, fixed_pages=1, scope="step"),
    }.items():
        with pytest.raises(PlanError, match=words):
            bad()


def test_equal_plans_are_equal_in_every_way_whatever_they_were_made_of() -> None:
    def plan(kind: Any) -> PoolPlan:
        slab = Slab("k", spec("q8_0"), kind([0, 1]), 1, 64)
        return PoolPlan(16, kind([Tier("full", kind([slab]))]))

    assert plan(list) == plan(tuple)
    assert hash(plan(list)) == hash(plan(tuple))
    assert repr(plan(list)) == repr(plan(tuple))
    assert root_key(plan(list), "", "") == root_key(plan(tuple), "", "")
    layers = Slab("k", spec("q8_0"), range(2), 1, 64).layers  # type: ignore[arg-type]
    assert layers == (0, 1)


@pytest.mark.parametrize("bad", [-1, 1.0, True, None])
def test_counts_of_the_wrong_kind(bad: object) -> None:
    plan = hybrid_35b("q4_0")
    with pytest.raises(PageError, match="pages"):
        plan.nbytes(bad)  # type: ignore[arg-type]
    with pytest.raises(PageError, match="budget_bytes"):
        plan.pages_for(bad)  # type: ignore[arg-type]
