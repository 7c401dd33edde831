"""Every tensor of a call is verified before anything runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvq_attention import (
    AttentionError,
    Batch,
    BatchError,
    DeviceError,
    Table,
    TensorError,
    UnsupportedError,
    ops,
)
from kvq_codecs import Encoded, Plane, Spec, get

from .scene import TIER, Geometry, Scene, assert_same_bytes, build, poisoned

T, HQ, HKV, D, DV, PAGES, PAGE_TOKENS = 3, 4, 2, 64, 32, 5, 16


def scene() -> Scene:
    geometry = Geometry(
        "q8_0", "q4_0", heads=HQ, kv_heads=HKV, dim=D, v_dim=DV, lengths=(4, 20, 17)
    )
    return build(geometry, stored_queries=True)


def call(op: str, **changes: Any) -> Any:
    """A call of an op that is right but for the changes."""
    good = scene()
    k, v = good.fresh()
    given = {
        "q": good.q,
        "k": k,
        "v": v,
        "k_cache": good.k_cache,
        "v_cache": good.v_cache,
        "slot_mapping": good.batch().tables[TIER].slot_mapping,
        "batch": good.batch(),
        "tier": TIER,
        "scale": 0.125,
    }
    names = {
        "store": ("k", "v", "k_cache", "v_cache", "slot_mapping"),
        "decode": ("q", "k_cache", "v_cache", "batch", "tier", "scale"),
        "extend": ("q", "k", "v", "k_cache", "v_cache", "batch", "tier", "scale"),
    }[op]
    arguments = {name: given[name] for name in names} | changes
    return getattr(ops, op)(**arguments)


def without(cache: Encoded, plane: str, instead: object) -> Encoded:
    """A cache one of whose planes was taken away after it was made."""
    broken = Encoded(cache.spec, cache.dim, dict(cache.planes))
    object.__setattr__(broken, "planes", {**cache.planes, plane: instead})
    return broken


@pytest.mark.parametrize("op", ["store", "decode", "extend"])
def test_the_unchanged_call_is_right(op: str) -> None:
    out = call(op)
    assert out is None if op == "store" else out.shape == (T, HQ, DV)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    (
        "store",
        {"k": torch.zeros(T, HKV, D + 32)},
        r"2 of k \[3, 2, 96\] is D = 96, but k_cache has",
    ),
    ("store", {"k": torch.zeros(T, HKV + 1, D)}, r"axis 1 of k .* is Hkv = 3, but k_cache has"),
    ("store", {"v": torch.zeros(T, HKV, D)}, r"axis 2 of v .* is Dv = 64, but v_cache has Dv = 32"),
    ("store", {"v": torch.zeros(T + 1, HKV, DV)}, r"axis 0 of v .* is T = 4, but k has T = 3"),
    ("store", {"k": torch.zeros(T, HKV * D)}, r"k must have axes \[T, Hkv, D\], got \[3, 128\]"),
    (
        "store",
        {"k": torch.zeros(T, HKV, D).int()},
        r"k must be torch.float16 or .*, got torch.int32",
    ),
    ("store", {"k": np.zeros((T, HKV, D))}, r"k must be a torch tensor, got ndarray"),
    ("store", {"slot_mapping": torch.zeros(T).int()}, r"slot_mapping must be torch.int64, got"),
    ("store", {"slot_mapping": torch.zeros(T + 1).long()}, r"slot_mapping .* is T = 4, but k has"),
    (
        "store",
        {"k_cache": poisoned("q8_0", PAGES, HKV, 8, D, "cpu")},
        r"v_cache .* but k_cache has",
    ),
    ("store", {"k_cache": {"codes": torch.zeros(1)}}, r"k_cache must be a kvq_codecs.Encoded view"),
    ("decode", {"q": torch.zeros(T, HQ, D + 1)}, r"axis 2 of q .* is D = 65, but k_cache has"),
    ("decode", {"q": torch.zeros(T, HQ + 1, D)}, r"q has 5 heads, .* not a multiple of .* 2"),
    ("decode", {"q": torch.zeros(T + 2, HQ, D)}, r"slot_mapping .* is T = 3, but q has T = 5"),
    ("decode", {"q": torch.zeros(T, HQ, D).char()}, r"q must be .*, got torch.int8"),
    ("decode", {"sinks": torch.zeros(HQ + 1)}, r"axis 0 of sinks .* is Hq = 5, but q has Hq = 4"),
    ("decode", {"sinks": [0.0] * HQ}, r"sinks must be a torch tensor, got list"),
    ("decode", {"scale": float("inf")}, r"scale must be a number in ±3.403e\+38"),
    ("decode", {"window": 0}, r"window counts the query's own position"),
    ("decode", {"scale": None}, r"scale must be a number .*, got None"),
    ("decode", {"batch": None}, r"batch must be a Batch, got NoneType"),
    ("decode", {"tier": [TIER]}, r"no tier \['full'\]; it has \['full'\]"),
    ("decode", {"q": torch.zeros(T, 0, D)}, r"axis 1 of q \[3, 0, 64\] is Hq = 0"),
    ("store", {"k_cache": poisoned("q8_0", 0, HKV, 16, D, "cpu")}, r"of k_cache .* is P = 0"),
    ("store", {"k_cache": poisoned("q8_0", PAGES, 0, 16, D, "cpu")}, r"of k_cache .* is Hkv = 0"),
    ("store", {"k_cache": poisoned("q8_0", PAGES, HKV, 0, D, "cpu")}, r"of k_cache .* is N = 0"),
    ("extend", {"batch": {TIER: None}}, r"batch must be a Batch, got dict"),
    ("extend", {"k": torch.zeros(T, HKV, D + 32)}, r"axis 2 of k .* is D = 96, but k_cache has"),
    ("extend", {"v": torch.zeros(T - 1, HKV, DV)}, r"axis 0 of v .* is T = 2, but k has T = 3"),
]


@pytest.mark.parametrize(("op", "changes", "said"), WRONG, ids=range(len(WRONG)))
def test_what_does_not_fit_is_named(op: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(AttentionError, match=said):
        call(op, **changes)


@pytest.mark.parametrize(
    ("op", "name"), [("store", "k"), ("store", "slot_mapping"), ("decode", "q"), ("extend", "v")]
)
def test_sparse_tensors_are_refused_by_their_layout(op: str, name: str) -> None:
    good = scene()
    k, v = good.fresh()
    slots = good.batch().tables[TIER].slot_mapping
    sparse = {"k": k, "v": v, "q": good.q, "slot_mapping": slots}[name].to_sparse()
    said = f"{name} must be dense, of layout torch.strided, got torch.sparse_coo"
    with pytest.raises(TensorError, match=said):
        call(op, **{name: sparse})


def test_sparse_planes_are_refused_by_their_layout() -> None:
    good = scene().k_cache
    sparse = without(good, "codes", good.planes["codes"].to_sparse())
    with pytest.raises(TensorError, match=r"k_cache\['codes'\] must be dense.* torch.sparse_coo"):
        call("store", k_cache=sparse)


@pytest.mark.parametrize("op", ["decode", "extend"])
def test_the_batch_must_fit_the_caches(op: str) -> None:
    with pytest.raises(BatchError, match="no tier 'window'"):
        call(op, tier="window")
    other = build(Geometry(lengths=(4, 20, 17), page_tokens=32), stored_queries=True).batch()
    with pytest.raises(TensorError, match="counts 32 tokens a page, the caches have 16"):
        call(op, batch=other)


@pytest.mark.parametrize("op", ["store", "decode", "extend"])
@pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
def test_p049_a_missing_scale_plane_raises(op: str, cache: str) -> None:
    good = getattr(scene(), cache)
    with pytest.raises(ValueError, match=f"plane 'scale' of {cache} must be .*got NoneType"):
        call(op, **{cache: without(good, "scale", None)})
    with pytest.raises(ValueError, match="scale"):
        Encoded(good.spec, good.dim, {**good.planes, "scale": None})


def test_rows_of_another_codec_under_the_same_name_are_refused() -> None:
    spec = Spec("q8_0", (Plane("values", "float32"),), source="an impostor")
    cache = Encoded(spec, D, {"values": torch.zeros(PAGES, HKV, PAGE_TOKENS, D)})
    assert spec != get("q8_0").spec
    with pytest.raises(
        TensorError, match="k_cache holds rows of a q8_0 that is not the registered"
    ):
        call("decode", k_cache=cache)


@pytest.mark.parametrize(
    ("op", "moved"),
    [
        ("store", "k"),
        ("store", "v"),
        ("store", "slot_mapping"),
        ("decode", "q"),
        ("decode", "sinks"),
        ("extend", "v"),
    ],
)
def test_f13_mixed_devices_are_refused(op: str, moved: str) -> None:
    """The meta device stands for the second one: no GPU is needed to mix devices."""
    good = scene()
    k, v = good.fresh()
    tensors = {
        "k": k,
        "v": v,
        "q": good.q,
        "sinks": torch.zeros(HQ),
        "slot_mapping": good.batch().tables[TIER].slot_mapping,
    }
    before = [cache.map(torch.clone) for cache in good.caches]
    caches = dict(zip(("k_cache", "v_cache"), good.caches, strict=True))
    with pytest.raises(DeviceError, match=rf"one device.*{moved} on meta"):
        call(op, **caches, **{moved: tensors[moved].to("meta")})
    for cache, copy in zip(good.caches, before, strict=True):
        assert_same_bytes(cache, copy)


@pytest.mark.parametrize("op", ["store", "decode", "extend"])
@pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
def test_f13_a_cache_on_another_device_is_refused(op: str, cache: str) -> None:
    moved = getattr(scene(), cache).map(lambda plane: plane.to("meta"))
    with pytest.raises(DeviceError, match=rf"{cache}\['codes'\], {cache}\['scale'\] on meta"):
        call(op, **{cache: moved})


@pytest.mark.parametrize("op", ["decode", "extend"])
def test_f13_a_batch_on_another_device_is_refused(op: str) -> None:
    batch = scene().batch()
    table = batch.tables[TIER]
    moved = Batch(
        batch.query_offsets.to("meta"),
        batch.seq_lens.to("meta"),
        {TIER: Table(table.page_table.to("meta"), table.slot_mapping.to("meta"))},
        batch.page_tokens,
    )
    with pytest.raises(DeviceError, match="batch on meta"):
        call(op, batch=moved)


@pytest.mark.parametrize("op", ["store", "decode", "extend"])
def test_tensors_without_values_are_refused(op: str) -> None:
    good = scene()
    k, v = (x.to("meta") for x in good.fresh())
    batch = good.batch()
    table = batch.tables[TIER]
    moved = Table(table.page_table.to("meta"), table.slot_mapping.to("meta"))
    given = {
        "q": good.q.to("meta"),
        "k": k,
        "v": v,
        "k_cache": good.k_cache.map(lambda plane: plane.to("meta")),
        "v_cache": good.v_cache.map(lambda plane: plane.to("meta")),
        "slot_mapping": moved.slot_mapping,
        "batch": Batch(
            batch.query_offsets.to("meta"), batch.seq_lens.to("meta"), {TIER: moved}, PAGE_TOKENS
        ),
    }
    names = {
        "store": ("k", "v", "k_cache", "v_cache", "slot_mapping"),
        "decode": ("q", "k_cache", "v_cache", "batch"),
        "extend": ("q", "k", "v", "k_cache", "v_cache", "batch"),
    }[op]
    with pytest.raises(UnsupportedError, match=f"reference lacks {op} for device meta"):
        call(op, **{name: given[name] for name in names})


@pytest.mark.parametrize(
    ("op", "wide", "lacking"),
    [
        ("store", "v", "store with float64"),
        ("decode", "q", "decode with float64"),
        ("extend", "k", "extend with float64"),
    ],
)
def test_float64_is_refused_by_triton_and_served_by_auto(op: str, wide: str, lacking: str) -> None:
    good = scene()
    k, v = good.fresh()
    given = {wide: {"q": good.q, "k": k, "v": v}[wide].double()}
    with pytest.raises(UnsupportedError, match=rf"triton lacks .*{lacking}; .*can: reference$"):
        call(op, **given, backend="triton")
    call(op, **given)


@pytest.mark.gpu
@pytest.mark.parametrize("moved", ["k", "v", "slot_mapping"])
def test_f13_host_tensors_beside_a_gpu_cache_are_refused(moved: str) -> None:
    good = build(Geometry(lengths=(4, 20, 17)), "cuda", stored_queries=True)
    k, v = good.fresh()
    given = {"k": k, "v": v, "slot_mapping": good.batch().tables[TIER].slot_mapping}
    given[moved] = given[moved].cpu()
    with pytest.raises(DeviceError, match=f"{moved} on cpu"):
        ops.store(**given, k_cache=good.k_cache, v_cache=good.v_cache)


@pytest.mark.parametrize("op", ["store", "decode", "extend"])
def test_an_unknown_backend_is_refused(op: str) -> None:
    with pytest.raises(
        UnsupportedError, match="unknown attention backend 'flash'; there are auto, "
    ):
        call(op, backend="flash")


def test_autograd_holds_nothing() -> None:
    q = scene().q.requires_grad_()
    assert not call("decode", q=q).requires_grad
