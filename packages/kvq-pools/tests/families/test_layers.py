"""Layer maps, layouts by layer and the heads of a rank."""

from __future__ import annotations

from typing import Any

import pytest
from pool_cases import spec

from kvq_pools import PlanError, Pool, PoolPlan, dsa, heads_per_rank, hybrid_swa, mha, mla, qsa


@pytest.mark.parametrize(
    ("heads", "ranks", "each"),
    [(8, 1, 8), (8, 2, 4), (8, 8, 1), (2, 4, 1), (1, 8, 1), (6, 3, 2), (4, 12, 1)],
)
def test_heads_are_divided_or_replicated(heads: int, ranks: int, each: int) -> None:
    assert heads_per_rank(heads, ranks) == each
    assert each * ranks >= heads


@pytest.mark.parametrize(("heads", "ranks"), [(8, 3), (3, 2), (4, 6)])
def test_heads_that_no_rank_can_hold_evenly_are_refused(heads: int, ranks: int) -> None:
    with pytest.raises(PlanError, match=f"{heads} KV heads .* {ranks} ranks"):
        heads_per_rank(heads, ranks)


@pytest.mark.parametrize("bad", [0, -1, 2.0, True])
def test_counts_of_heads_and_ranks_are_ints(bad: Any) -> None:
    with pytest.raises(PlanError, match="kv_heads"):
        heads_per_rank(bad, 1)
    with pytest.raises(PlanError, match="ranks"):
        heads_per_rank(8, bad)


def mixed(**change: Any) -> PoolPlan:
    """`0-1:bf16,2-:q4_0` for keys, q8_0 for values."""
    options: dict[str, Any] = {
        "layers": (0, 1, 2, 5),
        "kv_heads": 2,
        "head_dim": 64,
        "k": {0: spec("bf16"), 1: spec("bf16"), 2: spec("q4_0"), 5: spec("q4_0")},
        "v": spec("q8_0"),
        "page_tokens": 16,
    }
    return mha(**(options | change))


def test_layers_of_one_layout_share_a_slab() -> None:
    (tier,) = mixed().tiers
    assert [(s.name, s.spec.name, s.layers) for s in tier.slabs] == [
        ("k", "bf16", (0, 1)),
        ("k", "q4_0", (2, 5)),
        ("v", "q8_0", (0, 1, 2, 5)),
    ]
    assert mixed().token_bytes == 2 * (2 * 128 + 2 * 36 + 4 * 68)


def test_layers_of_one_layout_need_not_be_neighbours() -> None:
    sandwich = {0: spec("bf16"), 1: spec("q4_0"), 2: spec("q4_0"), 5: spec("bf16")}
    plan = mixed(k=sandwich)
    assert [s.layers for s in plan.tiers[0].slabs if s.name == "k"] == [(0, 5), (1, 2)]
    pool = Pool(plan, 1)
    assert {n: pool.view("k", n).spec.name for n in sandwich} == {
        0: "bf16",
        1: "q4_0",
        2: "q4_0",
        5: "bf16",
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({0: "bf16", 1: "bf16", 2: "q4_0"}, r"'k', \[0, 1, 2, 5\].* missing: \[5\]"),
        ({n: "bf16" for n in range(6)}, r"missing: \[\], without a cache: \[3, 4\]"),
        ({}, r"missing: \[0, 1, 2, 5\]"),
    ],
)
def test_a_layout_by_layer_names_every_layer_and_no_other(
    change: dict[int, str], words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        mixed(k={layer: spec(name) for layer, name in change.items()})


@pytest.mark.parametrize("bad", ["q8_0", None, []])
def test_what_a_layout_by_layer_names_must_be_a_layout(bad: Any) -> None:
    with pytest.raises(PlanError, match=r"must be a kvq_codecs\.Spec"):
        mixed(k={0: bad, 1: spec("bf16"), 2: spec("bf16"), 5: spec("bf16")})


def test_hybrids_name_the_layouts_of_both_tiers_in_one_map() -> None:
    layouts = {0: spec("q4_0"), 1: spec("bf16"), 2: spec("q4_0"), 3: spec("q8_0")}

    def hybrid(k: Any) -> PoolPlan:
        return hybrid_swa(
            full_layers=(1, 3),
            window_layers=(0, 2),
            window=8,
            kv_heads=1,
            head_dim=64,
            k=k,
            v=layouts,
            page_tokens=4,
            window_pages=3,
        )

    full, window = hybrid(layouts).tiers
    assert [(s.name, s.spec.name, s.layers) for s in full.slabs[:2]] == [
        ("k", "bf16", (1,)),
        ("k", "q8_0", (3,)),
    ]
    assert [(s.name, s.spec.name, s.layers) for s in window.slabs] == [
        ("k", "q4_0", (0, 2)),
        ("v", "q4_0", (0, 2)),
    ]
    with pytest.raises(PlanError, match=r"missing: \[1\], without a cache: \[7\]"):
        hybrid({0: spec("q4_0"), 2: spec("q4_0"), 3: spec("q8_0"), 7: spec("q8_0")})


LATENT: dict[str, Any] = {
    "latent_dim": 64,
    "rope_dim": 32,
    "latent": spec("fp8"),
    "page_tokens": 16,
    "model_layers": 45,
}
INDEX: dict[str, Any] = {"index_dim": 32, "index": spec("bf16")}
QSA: dict[str, Any] = {
    "kv_heads": 1,
    "head_dim": 64,
    "k": spec("fp8"),
    "v": spec("fp8"),
    "index": spec("bf16"),
    "max_requests": 2,
    "max_step_tokens": 4,
    "model_layers": 45,
}


@pytest.mark.parametrize("layers", [(0, 45), (99,)])
def test_no_family_stores_a_layer_beyond_the_model(layers: tuple[int, ...]) -> None:
    for make in (
        lambda: mla(layers=layers, **LATENT),
        lambda: dsa(layers=layers, index_layers=(0,), **LATENT, **INDEX),
        lambda: dsa(layers=(0,), index_layers=layers, **LATENT, **INDEX),
        lambda: qsa(layers=layers, **QSA),
    ):
        with pytest.raises(PlanError, match=r"beyond a model of 45 layers"):
            make()
