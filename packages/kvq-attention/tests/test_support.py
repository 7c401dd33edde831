"""The table of what works with what: how a backend is picked, and why one is refused."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

import kvq_codecs
from kvq_attention import SUPPORT, UnsupportedError, ops, support
from kvq_attention.support import Need, Row

from .scene import TIER, Geometry, build

ASKED = {"k": "q8_0", "v": "q4_0", "head_dim": 64, "device": "cpu"}
THIRD = tuple(
    Row(op, "third", feature, "test", codecs=("q8_0", "q4_0"), head_dims=(64,), devices=("cpu",))
    for op in support.OPS
    for feature in ("plain", "mixed_codecs")
)


@pytest.fixture
def third(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A backend more, preferred by auto: rows and a module. Returns the calls it gets."""
    calls: list[str] = []

    def record(name: str) -> Any:
        return lambda *_: calls.append(name)

    module = ModuleType("third_backend")
    for op in support.OPS:
        setattr(module, op, record(op))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(support, "BACKENDS", {"third": module.__name__, **support.BACKENDS})
    monkeypatch.setattr(support, "SUPPORT", SUPPORT + THIRD)
    return calls


def test_each_row_is_one_claim_of_a_known_op_and_backend() -> None:
    assert len({row.id for row in SUPPORT}) == len(SUPPORT)
    assert {row.op for row in SUPPORT} == set(support.OPS)
    assert {row.backend for row in SUPPORT} == set(support.BACKENDS)


def test_auto_and_a_name_choose() -> None:
    assert support.choose(**ASKED) == "reference"
    assert support.choose("reference", **ASKED, features=["window", "sinks"]) == "reference"
    for codec in kvq_codecs.names():
        asked = {**ASKED, "k": codec, "v": codec, "head_dim": 256, "device": "cuda"}
        assert support.choose(**asked) == "reference"


def test_what_no_row_covers_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedError, match="'turbo'; there are auto, reference"):
        support.choose("turbo", **ASKED)
    with pytest.raises(UnsupportedError, match=r"unknown features \['alibi'\]; there are"):
        support.choose(**ASKED, features=["alibi"])
    for features in ("gqa", None, 5):
        with pytest.raises(UnsupportedError, match=f"collection of names, got {features!r}"):
            support.choose(**ASKED, features=features)
    with pytest.raises(UnsupportedError, match=r"reference lacks store with .* device meta"):
        support.choose(**{**ASKED, "device": "meta"})
    with pytest.raises(kvq_codecs.CodecError, match="iso3: head_dim 64 is not a multiple of 128"):
        support.choose(**{**ASKED, "k": "iso3"})
    with pytest.raises(kvq_codecs.CodecError, match="unknown codec 'q5_0'"):
        support.choose(**{**ASKED, "v": "q5_0"})
    with pytest.raises(kvq_codecs.CodecError, match="q4_0: head_dim 80"):
        support.choose(**ASKED, v_head_dim=80)


def test_a_call_needs_a_row_for_every_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    capless = tuple(row for row in SUPPORT if row.id != "reference.decode.softcap")
    monkeypatch.setattr(support, "SUPPORT", capless)
    scene = build(Geometry("q8_0"), stored_queries=True)
    with pytest.raises(UnsupportedError, match=r"reference lacks decode with softcap; .*can: none"):
        ops.decode(scene.q, *scene.caches, scene.batch(), TIER, scale=1.0, softcap=5.0)


def test_codecs_and_sizes_imply_features() -> None:
    need = Need("decode", "q8_0", "q4_0", 64, 32, "cpu", frozenset({"window"}))
    assert need.all_features == ["mixed_codecs", "plain", "value_dim", "window"]
    assert Need("store", "fp8", "fp8", 64, 64, "cpu").all_features == ["plain"]


def test_a_backend_is_added_by_rows_and_a_module(third: list[str]) -> None:
    scene = build(Geometry("q8_0", "q4_0"), stored_queries=True)
    k, v = scene.fresh()
    batch, q, scale = scene.batch(), scene.q, scene.scale
    slots = batch.tables[TIER].slot_mapping
    for backend in ("auto", "third"):
        ops.store(k, v, *scene.caches, slots, backend=backend)
        ops.decode(q, *scene.caches, batch, TIER, scale=scale, backend=backend)
        ops.extend(q, k, v, *scene.caches, batch, TIER, scale=scale, backend=backend)
    assert third == [*support.OPS] * 2
    # What it does not cover: auto goes on to one that does, its name is refused with the reason.
    out = ops.decode(q, *scene.caches, batch, TIER, scale=scale, window=5)
    assert isinstance(out, torch.Tensor)
    with pytest.raises(UnsupportedError, match=r"third lacks decode with window; .*can: reference"):
        ops.decode(q, *scene.caches, batch, TIER, scale=scale, window=5, backend="third")
    with pytest.raises(UnsupportedError, match=r"third lacks decode with gqa; .*can: reference"):
        twice = torch.cat([q, q], dim=1)
        ops.decode(twice, *scene.caches, batch, TIER, scale=scale, backend="third")
    assert len(third) == 6


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"k": "fp8"}, r"store with plain for codec fp8 \(has q8_0, q4_0\)"),
        ({"head_dim": 128}, r"decode with plain for head_dim 128 \(has 64\)"),
        ({"v_head_dim": 32}, "store with value_dim"),
        ({"device": "cuda"}, r"extend with plain for device cuda \(has cpu\)"),
        ({"features": ["sinks"]}, "decode with sinks, extend with sinks"),
    ],
)
def test_a_named_backend_is_refused_with_those_that_can(
    third: list[str], change: dict[str, Any], said: str
) -> None:
    asked = {**ASKED, **change}
    with pytest.raises(UnsupportedError, match=f"third lacks .*{said}.*can: reference"):
        support.choose("third", **asked)
    assert support.choose("auto", **asked) == "reference"
    assert third == []


def test_the_page_shows_every_row() -> None:
    page = support.markdown()
    assert page.count("\n| reference |") == len(SUPPORT)
    for row in SUPPORT:
        assert (
            f"| {row.op} | {row.feature} | every | as the codec allows | any | `{row.proof}` |"
            in page
        )
