"""Which layers a family stores, and where."""

from __future__ import annotations

from typing import Any

import pytest
from pool_cases import spec

import kvq_codecs
from kvq_codecs import RowError, Spec
from kvq_pools import PlanError, PoolPlan, Slab, hybrid_swa, mha

SHAPE: dict[str, Any] = {"kv_heads": 2, "head_dim": 64, "page_tokens": 16}


def swa(**change: Any) -> PoolPlan:
    options = {
        "full_layers": (1, 3),
        "window_layers": (0, 2, 4),
        "window": 24,
        "window_pages": 6,
        "k": spec("q8_0"),
        "v": spec("q4_0"),
        **SHAPE,
    }
    return hybrid_swa(**(options | change))


def test_mha_keeps_keys_and_values_of_the_layers_named() -> None:
    plan = mha(layers=iter([3, 7]), k=spec("q8_0"), v=spec("q4_0"), **SHAPE)
    (tier,) = plan.tiers
    assert (tier.name, tier.window, tier.fixed_pages) == ("full", None, None)
    assert [(s.name, s.spec.name, s.layers) for s in tier.slabs] == [
        ("k", "q8_0", (3, 7)),
        ("v", "q4_0", (3, 7)),
    ]
    assert plan.token_bytes == 2 * 2 * (68 + 36)


def test_hybrid_gives_each_layer_to_one_tier() -> None:
    plan = swa()
    assert [(t.name, t.window, t.fixed_pages) for t in plan.tiers] == [
        ("full", None, None),
        ("window", 24, 6),
    ]
    assert [plan.tier_of(n).name for n in range(5)] == [
        "window",
        "full",
        "window",
        "full",
        "window",
    ]
    assert plan.token_bytes == 2 * 2 * (68 + 36)
    assert plan.fixed_bytes == 16 * 2 * (68 + 36) * (2 * 1 + 3 * (6 + 1))


def test_where_every_layer_slides_the_window_tier_grows() -> None:
    plan = swa(full_layers=(), window_pages=None)
    assert [(t.name, t.window, t.fixed_pages) for t in plan.tiers] == [("window", 24, None)]
    assert plan.token_bytes == 3 * 2 * (68 + 36)
    with pytest.raises(PlanError, match="window_pages is 6"):
        swa(full_layers=())


def test_layers_are_mapped_or_refused() -> None:
    with pytest.raises(PlanError, match=r"\[45\] are beyond .* 45 layers \(0 … 44\)"):
        mha(layers=(0, 45), k=spec("fp8"), v=spec("fp8"), model_layers=45, **SHAPE)
    with pytest.raises(PlanError, match="beyond"):
        swa(model_layers=4)
    with pytest.raises(PlanError, match="layer id"):
        swa(full_layers=(-1,))
    with pytest.raises(PlanError, match="'k' of layer 2 is stored twice"):
        swa(full_layers=(1, 2))
    with pytest.raises(KeyError, match=r"layer 5\b"):
        swa(model_layers=9).tier_of(5)


@pytest.mark.parametrize("bad", ["a", 1.5, True, None, -1])
@pytest.mark.parametrize("model_layers", [None, 5])
def test_what_is_no_layer_id_is_refused(bad: Any, model_layers: int | None) -> None:
    for layers in ([bad], [0, bad]):
        with pytest.raises(PlanError, match="layer id must be an int of at least 0"):
            mha(layers=layers, k=spec("fp8"), v=spec("fp8"), model_layers=model_layers, **SHAPE)
        for kind in ("full_layers", "window_layers"):
            with pytest.raises(PlanError, match="layer id must be an int of at least 0"):
                swa(model_layers=model_layers, **{kind: layers})
    if bad != "a":  # text is a collection, though of no layer ids
        with pytest.raises(PlanError, match="layers must be global layer ids"):
            mha(layers=bad, k=spec("fp8"), v=spec("fp8"), model_layers=model_layers, **SHAPE)


@pytest.mark.parametrize("bad", ["q8_0", kvq_codecs.get("q8_0"), None, 8, Spec])
def test_what_is_no_layout_is_refused(bad: Any) -> None:
    said = r"must be a kvq_codecs.Spec, got .*; kvq_codecs.get\(name\).spec is a codec's"
    for change in ({"k": bad}, {"v": bad}):
        with pytest.raises(PlanError, match=said):
            swa(**change)
        with pytest.raises(PlanError, match=said):
            mha(layers=(0,), **{"k": spec("q8_0"), "v": spec("q8_0"), **SHAPE, **change})
    with pytest.raises(PlanError, match=said):
        Slab("k", bad, (0,), 1, 64)


def test_a_hybrid_needs_window_layers_a_window_and_window_pages() -> None:
    with pytest.raises(PlanError, match="an mha"):
        swa(window_layers=())
    with pytest.raises(PlanError, match="window_pages must be given"):
        swa(window_pages=None)
    with pytest.raises(PlanError, match="window must be"):
        swa(window=0)


def test_a_codec_whose_block_does_not_fit_is_refused_for_k_and_for_v() -> None:
    for k, v in (("iso4", "q8_0"), ("q8_0", "iso4")):
        with pytest.raises(RowError, match=r"iso4: head_dim 64 .* 128"):
            swa(k=spec(k), v=spec(v))
