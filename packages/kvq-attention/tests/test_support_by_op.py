"""Backends asked for op by op, and calls that a backend which serves the op refuses."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvq_attention import UnsupportedError, claims, crossovers, launches, ops, support
from kvq_attention.needs import Need, Row

from .backends import ASKED, ON_GPU, module, without
from .scene import TIER, Geometry, build


def test_a_backend_may_be_asked_for_op_by_op(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    auto = dict.fromkeys(support.OPS, "auto")
    assert support.asked("auto") == auto
    assert support.asked("triton") == dict.fromkeys(support.OPS, "triton")
    named = {"decode": "triton", "store": "reference"}
    assert support.asked("decode=triton,store=reference") == {**auto, **named}
    choice = support.choose("store=reference", **ON_GPU)
    assert str(choice) == "reference for store, triton for decode and extend"
    assert choice.passed_over == ()
    assert support.choose("extend=triton", **ON_GPU).extend == "triton"
    without(monkeypatch, "triton", "extend")
    choice = support.choose("store=reference", **ON_GPU)
    assert choice.by_op() == {"store": "reference", "decode": "triton", "extend": "reference"}
    assert choice.passed_over == ("triton lacks extend",)
    choice = support.choose("decode=triton,extend=reference,store=triton", **ASKED)
    assert str(choice) == "triton for store and decode, reference for extend"
    assert choice.passed_over == ()
    with pytest.raises(
        UnsupportedError, match=r"^extend: triton lacks extend; .*that can: reference$"
    ):
        support.choose("extend=triton", **ON_GPU)


@pytest.mark.parametrize(
    ("backend", "problem"),
    [
        ("turbo", "; there are auto, cuda, triton, reference, and OP=NAME,… for single op"),
        (
            "reference,triton",
            "; there are auto, .*, and OP=NAME,… for single operations, as in dec",
        ),
        ("", "; there are auto, cuda"),
        (None, "; there are auto, cuda"),
        ("decode=", ": unknown backend '' for decode; there are auto, cuda, triton, reference$"),
        ("decode=triton=cuda", ": unknown backend 'triton=cuda' for decode; there are auto"),
        ("decode=triton;store=triton", ": unknown backend 'triton;store=triton' for decode"),
        ("=triton", ": '' is no operation here; there are store, decode and extend, as in decode="),
        ("decode=triton,", ": '' is no operation here; there are store, decode and extend"),
        ("encode=triton", ": 'encode' is no operation here; there are store, decode and extend"),
        ("decode=triton,store", ": 'store' is given no backend; write OP=NAME, as in store=auto$"),
        ("copy_pages=reference", ": 'copy_pages' is no operation here; there are store, decode an"),
        ("decode=triton,decode=reference", ": decode is named twice; give it one backend$"),
        ("decode=triton,store=auto,decode=triton", ": decode is named twice"),
        ("decode=auto,decode=triton", ": decode is named twice"),
    ],
)
def test_what_cannot_be_read_is_quoted_whole(gpu: Any, backend: Any, problem: str) -> None:
    with pytest.raises(
        UnsupportedError, match=f"attention backend {re.escape(repr(backend))}{problem}"
    ):
        support.choose(backend, **ON_GPU)


def test_an_operation_must_be_one_that_the_caller_has() -> None:
    assert support.asked("copy_pages=triton")["copy_pages"] == "triton"
    assert support.asked("store=triton", ("store", "decode"))["store"] == "triton"
    with pytest.raises(UnsupportedError, match="'extend' is no operation here; there are store an"):
        support.asked("extend=reference", ("store", "decode"))
    assert support.named("decode=triton,store=auto") == {"decode": "triton"}
    assert support.named("triton") == support.named("auto") == {}


def test_every_operation_that_is_refused_is_told(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "triton", "extend")
    with pytest.raises(
        UnsupportedError,
        match=r"^decode: cuda cannot run on cuda: no CuPy; backends that can: triton, reference; "
        r"extend: triton lacks extend; backends that can: reference$",
    ):
        support.choose("extend=triton,decode=cuda", **ON_GPU)
    gpu("the driver is too old")
    with pytest.raises(
        UnsupportedError,
        match=r"^store: triton cannot run on cuda: the driver is too old; .*; decode: cuda cannot ",
    ):
        support.choose("store=triton,decode=cuda", **ON_GPU)


def test_without_a_call_or_a_format_there_is_nothing_to_find() -> None:
    for backend in ("auto", "reference", "cuda"):
        with pytest.raises(UnsupportedError, match="no call was given"):
            support.pick(backend, [])
        with pytest.raises(UnsupportedError, match="formats is empty; give the codecs"):
            support.choose(backend, **{**ASKED, "formats": []})


def test_a_backend_of_some_ops_is_refused_with_how_to_ask_for_them(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "triton", "extend")
    with pytest.raises(
        UnsupportedError,
        match=r"that can: reference; store=triton,decode=triton takes what it has$",
    ):
        support.choose("triton", **ASKED)


def test_a_row_may_hold_for_so_many_query_heads_a_kv_head(
    third: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [Row("decode", "third", "gqa", "test"), *support.SUPPORT]
    few = tuple(replace(row, most_group=3) if row.backend == "third" else row for row in rows)
    monkeypatch.setattr(support, "SUPPORT", few)
    asked = {**ASKED, "features": ["gqa"]}
    assert support.choose("decode=third", **asked, group=3).decode == "third"
    reason = (
        r"^(decode: )?third lacks decode for 4 query heads a KV head \(has at most 3\); .*ence$"
    )
    with pytest.raises(UnsupportedError, match=reason):
        support.choose("decode=third", **asked, group=4)
    scene = build(Geometry("q8_0", "q4_0", heads=4, kv_heads=1), stored_queries=True)
    given = (scene.q, *scene.caches, scene.batch(), TIER)
    with pytest.raises(UnsupportedError, match=reason):
        ops.decode(*given, scale=1.0, backend="third")
    ops.decode(scene.q[:, :3], *given[1:], scale=1.0, backend="third")
    assert third == ["decode"]


def test_cuda_decodes_only_and_is_asked_for_by_name(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnsupportedError, match=r"^decode: cuda cannot run on cuda: no CuPy; "):
        support.choose("decode=cuda", **ON_GPU)
    monkeypatch.setitem(sys.modules, "nowhere", module("nowhere", []))
    with pytest.raises(
        UnsupportedError,
        match=r"^cuda lacks store and extend; backends that can: triton, reference; decode=cuda ta",
    ):
        support.choose("cuda", **ON_GPU)
    assert support.choose(**ON_GPU).decode == "triton"
    choice = support.choose("decode=cuda", **ON_GPU, features=["gqa"], group=16)
    assert str(choice) == "triton for store and extend, cuda for decode"
    with pytest.raises(UnsupportedError, match=r"^decode: cuda lacks decode for 17 query heads a "):
        support.choose("decode=cuda", **ON_GPU, features=["gqa"], group=17)


@pytest.fixture
def cuda(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's kernels run, too."""
    monkeypatch.setitem(sys.modules, "nowhere", module("nowhere", []))


BF16_PAIRS = [("bf16", "bf16"), ("bf16", "q8_0"), ("q8_0", "bf16")]


@pytest.mark.parametrize(
    "formats", [*[[pair] for pair in BF16_PAIRS], [("q8_0",) * 2, *BF16_PAIRS]]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_bf16_rows_are_cudas_with_bf16_queries_only(
    cuda: None, monkeypatch: pytest.MonkeyPatch, formats: list[tuple[str, str]], dtype: torch.dtype
) -> None:
    asked = {**ON_GPU, "formats": formats}
    bf16 = {**asked, "dtype": torch.bfloat16}
    assert support.choose("decode=cuda", **bf16).decode == "cuda"
    name = str(dtype).removeprefix("torch.")
    reason = rf"cuda lacks decode .*for bf16 rows and {name} queries \(has bfloat16\)"
    with pytest.raises(UnsupportedError, match=f"{reason}; backends that can: triton, reference$"):
        support.choose("decode=cuda", **{**asked, "dtype": dtype})
    # auto, where CUDA is the fastest, falls to the next and says why
    monkeypatch.setattr(crossovers, "fastest", lambda _, needs: needs[0].op == "decode")
    assert support.choose(**bf16).decode == "cuda"
    choice = support.choose(**{**asked, "dtype": dtype})
    assert choice.decode == choice.told("decode") == "triton"
    assert re.search(reason, choice.passed_over[0])


@pytest.mark.parametrize("codec", sorted({*claims.CUDA_CODECS} - {"bf16"}))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_other_rows_are_cudas_with_any_queries(cuda: None, codec: str, dtype: torch.dtype) -> None:
    asked = {**ON_GPU, "formats": [(codec, codec)], "head_dim": 128, "dtype": dtype}
    assert support.choose("decode=cuda", **asked).decode == "cuda"


def test_queries_of_float64_or_of_nobody_knows_what(cuda: None) -> None:
    asked = {**ON_GPU, "dtype": torch.float64}
    assert str(support.choose(**asked)) == "reference"
    with pytest.raises(
        UnsupportedError, match="triton lacks store, decode and extend with float64; "
    ):
        support.choose("triton", **asked)
    need = Need("decode", "bf16", "q8_0", 64, 64, 16, "cuda")
    with pytest.raises(UnsupportedError, match="for bf16 rows and unknown queries"):
        support.pick("cuda", [need])
    assert support.pick("cuda", [replace(need, query_dtype=torch.bfloat16)]) == "cuda"


def test_a_feature_that_no_row_has_is_told_with_what_needs_it(cuda: None) -> None:
    need = Need("decode", "q8_0", "q8_0", 128, 64, 16, "cuda")
    with pytest.raises(
        UnsupportedError,
        match=r"^cuda lacks decode with value_dim \(head_dim 128 of K, 64 of V\); backends that "
        "can: triton, reference$",
    ):
        support.pick("cuda", [need])


def test_a_call_is_held_to_the_dtype_of_its_queries(
    third: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def limited(row: Row) -> Row:
        mine = row.backend == "third" and row.op in ("decode", "extend")
        return replace(row, query_dtypes={"q4_0": (torch.bfloat16,)}) if mine else row

    monkeypatch.setattr(support, "SUPPORT", tuple(map(limited, support.SUPPORT)))
    scene = build(Geometry("q8_0", "q4_0"), stored_queries=True)
    k, v = scene.fresh()
    for dtype, runs in ((torch.bfloat16, 1), (torch.float32, 0), (torch.float16, 0)):
        third.clear()
        q = scene.q.to(dtype)
        decode = (q, *scene.caches, scene.batch(), TIER)
        extend = (q, k, v, *scene.caches, scene.batch(), TIER)
        ops.decode(*decode, scale=1.0)
        ops.extend(*extend, scale=1.0)
        assert third == ["decode", "extend"] * runs
        if not runs:
            with pytest.raises(UnsupportedError, match=r"q4_0 rows and float\d\d queries \(has bf"):
                ops.decode(*decode, scale=1.0, backend="third")
            with pytest.raises(UnsupportedError, match=r"q4_0 rows and float\d\d queries \(has bf"):
                ops.extend(*extend, scale=1.0, backend="third")


def test_auto_goes_on_where_a_backend_refuses_a_call(
    third: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = build(Geometry("q8_0", "q4_0"), stored_queries=True)
    given = (scene.q, *scene.caches, scene.batch(), TIER)
    refused: list[Any] = []

    def refusal(*args: Any) -> str | None:
        refused.append(args)
        return "a plane is not dense" if args[0].stride(-1) != 1 else None

    third_backend = sys.modules["third_backend"]
    monkeypatch.setattr(third_backend, "refusal", refusal, raising=False)
    ops.decode(*given, scale=1.0)
    assert third == ["decode"]
    key = ("third", "decode", "a plane is not dense")
    before = launches.passed_over().get(key, 0)
    strided = torch.stack([scene.q, scene.q], dim=-1)[..., 0]
    out = ops.decode(strided, *given[1:], scale=1.0)
    assert torch.equal(out, ops.decode(*given, scale=1.0, backend="reference"))
    assert launches.passed_over()[key] == before + 1
    assert third == ["decode"]
    assert refused[-1][:5] == (strided, *given[1:]) and refused[-1][5].scale == 1.0
    ops.decode(strided, *given[1:], scale=1.0, backend="third")  # a name is obeyed: it may refuse
    assert third == ["decode"] * 2 and launches.passed_over()[key] == before + 1
    monkeypatch.setattr(support, "BACKENDS", {"third": "third_backend"})
    with pytest.raises(
        UnsupportedError,
        match=r"^third cannot decode this: a plane is not dense; backends that can: none$",
    ):
        ops.decode(strided, *given[1:], scale=1.0)
