"""The table of what works with what: how a backend is picked, and why one is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import kvq_codecs
from kvq_attention import SUPPORT, UnsupportedError, claims, launches, ops, support
from kvq_attention.needs import Need

from . import invented
from .backends import ASKED, ON_GPU, without
from .scene import TIER, Geometry, build


def test_each_row_is_one_claim_of_a_known_op_and_backend() -> None:
    assert len({row.id for row in SUPPORT}) == len(SUPPORT)
    assert {row.op for row in SUPPORT} == set(support.OPS)
    assert {row.backend for row in SUPPORT} == set(support.BACKENDS)


def test_the_reference_serves_everything_everywhere() -> None:
    features = ["window", "sinks", "softcap", "gqa", "float64"]
    for codec in kvq_codecs.names():
        for device in ("cpu", "cuda", "xpu"):
            asked = {**ASKED, "formats": [(codec, codec)], "head_dim": 256, "device": device}
            choice = support.choose("reference", **asked, features=features)
            assert choice == support.Choice("reference", "reference", "reference")
            assert str(choice) == "reference"


def test_auto_takes_triton_where_it_runs_and_says_what_it_lacks(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {**ON_GPU, "features": ["gqa", "window", "softcap", "sinks"]}
    choice = support.choose(**asked)
    assert choice.by_op() == dict.fromkeys(support.MODEL_OPS, "triton")
    assert str(choice) == "triton" and choice.passed_over == ()
    without(monkeypatch, "triton", "extend")
    choice = support.choose(**asked)
    assert choice.by_op() == {"store": "triton", "decode": "triton", "extend": "reference"}
    assert str(choice) == "triton for store and decode, reference for extend"
    assert choice.passed_over == ("triton lacks extend",)


def test_auto_never_takes_the_interpreter(gpu: Any) -> None:
    choice = support.choose(**ASKED)
    assert str(choice) == "reference"
    assert choice.passed_over == ()
    need = Need("store", "q8_0", "q8_0", 64, 64, 16, "cpu")
    assert support.pick("auto", [need]) == "reference"
    assert support.pick("triton", [need]) == "triton"


def test_p066_a_backend_that_cannot_run_is_named_with_the_reason(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu("the driver is too old")
    assert support.choose(**ON_GPU).passed_over == (
        "triton cannot run on cuda: the driver is too old",
    )
    without(monkeypatch, "triton", "extend")
    choice = support.choose(**ON_GPU)
    assert str(choice) == "reference"
    reason = "triton cannot run on cuda: the driver is too old"
    also = f"{reason}; it lacks extend"  # which no driver would bring
    assert choice.passed_over == (also,)
    with pytest.raises(UnsupportedError, match=f"^{also}; backends that can: reference$"):
        support.choose("triton", **ON_GPU)
    need = Need("store", "q8_0", "q8_0", 64, 64, 16, "cuda")
    with pytest.raises(
        UnsupportedError,
        match=r"^triton cannot run on cuda: the driver is too old; backends that can: reference$",
    ):
        support.pick("triton", [need])


def test_p066_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "BACKENDS", {**support.BACKENDS, "triton": "no_such_library.x"})
    assert support.unavailable("triton", "cuda") == "no_such_library is not installed"
    need = Need("decode", "q8_0", "q8_0", 64, 64, 16, "cuda")
    assert support.pick("auto", [need]) == "reference"
    with pytest.raises(UnsupportedError, match="cannot run on cuda: no_such_library is not inst"):
        support.pick("triton", [need])
    # a module of ours that is missing is a defect
    monkeypatch.setattr(support, "BACKENDS", {"triton": "kvq_attention.no_such_module"})
    with pytest.raises(ModuleNotFoundError):
        support.unavailable("triton", "cuda")


def test_a_named_backend_serves_the_whole_model_or_is_refused(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = support.choose("triton", **ON_GPU)
    assert str(choice) == "triton" and choice.passed_over == ()
    without(monkeypatch, "triton", "extend")
    with pytest.raises(
        UnsupportedError,
        match=r"^triton lacks extend; backends that can: reference; "
        r"auto takes triton for store and decode, reference for extend$",
    ):
        support.choose("triton", **ON_GPU)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"head_dim": 72, "formats": [("fp8", "fp8")]}, r"head_dim 72 \(has 64, 80, 96, 112, "),
        ({"head_dim": 512}, r"head_dim 512 \(has 64, 80, 96, 112, 128, 192, 256\)"),
        ({"v_head_dim": 32}, r"head_dim 32 \(has 64, 80, 96, 112, 128, 192, 256\)"),
        ({"page_tokens": 1}, r"page_tokens 1 \(has 16, 32, 64, 128\)"),
        ({"page_tokens": 256}, r"page_tokens 256 \(has 16, 32, 64, 128\)"),
    ],
)
def test_p086_sizes_without_kernels_are_told_before_anything_runs(
    gpu: Any, change: dict[str, Any], why: str
) -> None:
    asked = {**ON_GPU, **change}
    choice = support.choose(**asked)
    assert str(choice) == "reference"
    (said,) = choice.passed_over
    assert re.match(f"triton lacks store, decode and extend for {why}", said)
    with pytest.raises(UnsupportedError, match=f"triton lacks .* for {why}.*can: reference$"):
        support.choose("triton", **asked)


@pytest.mark.parametrize("page_tokens", [1, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("codec", kvq_codecs.names())
def test_p057_every_page_size_is_served_for_every_codec(
    gpu: Any, codec: str, page_tokens: int
) -> None:
    for op in support.MODEL_OPS:
        need = Need(op, codec, codec, 128, 128, page_tokens, "cuda")
        if page_tokens in (1, 256):
            with pytest.raises(UnsupportedError, match=f"{op} for page_tokens {page_tokens} "):
                support.pick("triton", [need])
        wanted = "reference" if page_tokens in (1, 256) else "triton"
        assert support.pick("auto", [need]) == wanted


def test_a_model_whose_layers_differ_gets_backends_that_serve_all(gpu: Any) -> None:
    kvq_codecs.register(invented.CODEC)
    try:
        own = (invented.SPEC.name, "q8_0")
        choice = support.choose(**{**ON_GPU, "formats": [("q8_0", "q4_0"), own]})
        assert str(choice) == "reference"
        assert (
            "store, decode and extend for codec invented_5_bit (has fp32, " in choice.passed_over[0]
        )
    finally:
        kvq_codecs.unregister(invented.SPEC.name)


def test_float64_is_the_references(gpu: Any) -> None:
    need = Need("decode", "q8_0", "q8_0", 64, 64, 16, "cuda", frozenset({"float64"}))
    assert support.pick("auto", [need]) == "reference"
    with pytest.raises(
        UnsupportedError, match=r"^triton lacks decode with float64; .*: reference$"
    ):
        support.pick("triton", [need])


def test_what_no_row_covers_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedError, match=r"'turbo'; there are auto, cuda, triton, reference"):
        support.choose("turbo", **ASKED)
    with pytest.raises(UnsupportedError, match=r"unknown features \['alibi'\]; there are"):
        support.choose(**ASKED, features=["alibi"])
    for features in ("gqa", None, 5):
        with pytest.raises(UnsupportedError, match=f"collection of names, got {features!r}"):
            support.choose(**ASKED, features=features)
    meta = {**ASKED, "device": "meta"}
    with pytest.raises(UnsupportedError, match=r"reference lacks store for device meta .*: none"):
        support.choose(**meta)
    with pytest.raises(UnsupportedError, match="lacks store, decode and extend for device meta"):
        support.choose("reference", **meta)
    with pytest.raises(kvq_codecs.CodecError, match="iso3: head_dim 64 is not a multiple of 128"):
        support.choose(**{**ASKED, "formats": [("q8_0", "q8_0"), ("iso3", "q8_0")]})
    with pytest.raises(kvq_codecs.CodecError, match="unknown codec 'q5_0'"):
        support.choose(**{**ASKED, "formats": [("q8_0", "q5_0")]})
    with pytest.raises(kvq_codecs.CodecError, match="q4_0: head_dim 80"):
        support.choose(**ASKED, v_head_dim=80)


def test_a_call_needs_a_row_for_every_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    capless = tuple(row for row in SUPPORT if row.feature != "softcap")
    monkeypatch.setattr(support, "SUPPORT", capless)
    scene = build(Geometry("q8_0"), stored_queries=True)
    with pytest.raises(UnsupportedError, match=r"reference lacks decode with softcap; .*can: none"):
        ops.decode(scene.q, *scene.caches, scene.batch(), TIER, scale=1.0, softcap=5.0)


def test_codecs_and_sizes_imply_features() -> None:
    need = Need("decode", "q8_0", "q4_0", 64, 32, 16, "cpu", frozenset({"window"}))
    assert need.all_features == ["plain", "mixed_codecs", "value_dim", "window"]
    assert [need.in_words(feature) for feature in need.all_features] == [
        "plain",
        "mixed_codecs (K in q8_0, V in q4_0)",
        "value_dim (head_dim 64 of K, 32 of V)",
        "window",
    ]
    assert Need("store", "fp8", "fp8", 64, 64, 16, "cpu").all_features == ["plain"]


def test_a_backend_is_added_by_rows_and_a_module(third: list[str]) -> None:
    scene = build(Geometry("q8_0", "q4_0"), stored_queries=True)
    k, v = scene.fresh()
    batch, q, scale = scene.batch(), scene.q, scene.scale
    slots = batch.tables[TIER].slot_mapping
    pages = torch.tensor([0]), torch.tensor([1])
    with launches.counting() as launched:
        for backend in ("auto", "third"):
            ops.store(k, v, *scene.caches, slots, backend=backend)
            ops.decode(q, *scene.caches, batch, TIER, scale=scale, backend=backend)
            ops.extend(q, k, v, *scene.caches, batch, TIER, scale=scale, backend=backend)
            ops.copy_pages(scene.caches, *pages, backend=backend)
    assert third == [*support.OPS] * 2
    assert not any(launched["reference"].values())
    # What it does not cover: auto goes on to one that does, its name is refused with the reason.
    out = ops.decode(q, *scene.caches, batch, TIER, scale=scale, window=5)
    assert isinstance(out, torch.Tensor)
    with pytest.raises(
        UnsupportedError, match=r"third lacks decode with window; .*can: .*reference"
    ):
        ops.decode(q, *scene.caches, batch, TIER, scale=scale, window=5, backend="third")
    with pytest.raises(UnsupportedError, match=r"third lacks decode with gqa; .*can: .*reference"):
        twice = torch.cat([q, q], dim=1)
        ops.decode(twice, *scene.caches, batch, TIER, scale=scale, backend="third")
    assert len(third) == 8


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"formats": [("fp8", "q4_0")]},
            r"store, decode and extend for codec fp8 \(has q8_0, q4_0\)",
        ),
        ({"head_dim": 128}, r"store, decode and extend for head_dim 128 \(has 64\)"),
        ({"page_tokens": 32}, r"store, decode and extend for page_tokens 32 \(has 16\)"),
        (
            {"v_head_dim": 32},
            r"head_dim 32 \(has 64\); store, decode and extend with value_dim "
            r"\(head_dim 64 of K, 32 of V\)",
        ),
        ({"device": "cuda"}, r"extend for device cuda \(has cpu\)"),
        ({"features": ["sinks"]}, "third lacks decode and extend with sinks; backends"),
    ],
)
def test_a_named_backend_is_refused_with_those_that_can(
    third: list[str], change: dict[str, Any], said: str
) -> None:
    asked = {**ASKED, **change}
    with pytest.raises(UnsupportedError, match=f"{said}.*can: .*reference"):
        support.choose("third", **asked)
    assert support.choose("auto", **asked).extend != "third"
    assert third == []


def test_the_page_shows_every_row() -> None:
    page = claims.markdown().splitlines()
    named = ("| reference |", "| triton |", "| cuda |")
    assert sum(line.startswith(named) for line in page) == len(SUPPORT)
    every = "| every | as the codec allows | any | any | any | any |"
    assert f"| reference | store | plain {every} `{SUPPORT[0].proof}` |" in page
    (line,) = (line for line in page if line.startswith("| cuda | decode | sinks |"))
    assert "| 64, 128, 256 | 16, 32, 64, 128 | cuda | ≤ 16 | bfloat16 beside bf16 |" in line
    (line,) = (line for line in page if line.startswith("| triton | decode | sinks |"))
    assert "| 64, 80, 96, 112, 128, 192, 256 | 16, 32, 64, 128 | cuda, cpu | any | any |" in line


def test_the_features_of_a_need_may_be_any_collection() -> None:
    needs = [
        Need("decode", "q8_0", "q8_0", 64, 64, 16, "cpu", given)  # type: ignore[arg-type]
        for given in ({"window"}, ["window"], frozenset({"window"}))
    ]
    assert len(set(needs)) == 1 and support.pick("auto", needs[:1]) == "reference"
