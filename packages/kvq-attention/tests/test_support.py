"""The table of what works with what: how a backend is picked, and why one is refused."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

import kvq_codecs
from kvq_attention import SUPPORT, UnsupportedError, claims, crossovers, launches, ops, support
from kvq_attention.needs import Need, Row

from . import invented
from .scene import TIER, Geometry, build

ASKED: dict[str, Any] = {
    "formats": [("q8_0", "q4_0")],
    "head_dim": 64,
    "page_tokens": 16,
    "device": "cpu",
    "dtype": torch.float16,
}
ON_GPU = {**ASKED, "device": "cuda"}
THIRD = tuple(
    Row(
        *(op, "third", feature, "test"),
        codecs=("q8_0", "q4_0"),
        head_dims=(64,),
        page_tokens=(16,),
        devices=("cpu",),
    )
    for op in support.OPS
    for feature in ("plain", "mixed_codecs")
)


def module(name: str, calls: list[str], unavailable: str | None = None) -> ModuleType:
    """A backend that notes which of its ops are called."""

    def record(op: str) -> Any:
        return lambda *_: calls.append(op)

    made = ModuleType(name)
    for op in support.OPS:
        setattr(made, op, record(op))
    made.unavailable = lambda device: unavailable  # type: ignore[attr-defined]
    return made


@pytest.fixture
def third(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A backend more, preferred by auto: rows and a module. Returns the calls it gets."""
    calls: list[str] = []
    monkeypatch.setitem(sys.modules, "third_backend", module("third_backend", calls))
    monkeypatch.setattr(support, "BACKENDS", {"third": "third_backend", **support.BACKENDS})
    monkeypatch.setattr(support, "SUPPORT", SUPPORT + THIRD)
    return calls


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Says whether triton runs: without a GPU its rows are looked up as if there were one.

    CUDA's kernels run nowhere.
    """
    monkeypatch.setitem(sys.modules, "nowhere", module("nowhere", [], "no CuPy"))

    def with_triton(unavailable: str | None) -> None:
        monkeypatch.setitem(sys.modules, "stub", module("stub", [], unavailable))
        modules = {**support.BACKENDS, "triton": "stub", "cuda": "nowhere"}
        monkeypatch.setattr(support, "BACKENDS", modules)

    with_triton(None)
    return with_triton


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


def test_auto_takes_triton_where_it_runs_and_says_what_it_lacks(gpu: Any) -> None:
    choice = support.choose(**ON_GPU, features=["gqa", "window", "softcap", "sinks"])
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


def test_p066_a_backend_that_cannot_run_is_named_with_the_reason(gpu: Any) -> None:
    gpu("the driver is too old")
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


def test_a_named_backend_serves_the_whole_model_or_is_refused(gpu: Any) -> None:
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
    assert re.match(f"triton lacks store and decode for {why}", said)
    with pytest.raises(UnsupportedError, match=f"triton lacks .* for {why}.*can: reference$"):
        support.choose("triton", **asked)


@pytest.mark.parametrize("page_tokens", [1, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("codec", kvq_codecs.names())
def test_p057_every_page_size_is_served_for_every_codec(
    gpu: Any, codec: str, page_tokens: int
) -> None:
    for op in ("store", "decode"):
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
        assert "store and decode for codec invented_5_bit (has fp32, " in choice.passed_over[0]
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
            r"head_dim 32 \(has 64\); store, decode and extend with value_dim",
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
    assert support.choose("auto", **asked).extend == "reference"
    assert third == []


def test_a_backend_may_be_asked_for_op_by_op(gpu: Any) -> None:
    auto = dict.fromkeys(support.OPS, "auto")
    assert support.asked("auto") == auto
    assert support.asked("triton") == dict.fromkeys(support.OPS, "triton")
    named = {"decode": "triton", "store": "reference"}
    assert support.asked("decode=triton,store=reference") == {**auto, **named}
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


def test_every_operation_that_is_refused_is_told(gpu: Any) -> None:
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


def test_a_backend_of_some_ops_is_refused_with_how_to_ask_for_them(gpu: Any) -> None:
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
        match=r"^cuda lacks store and extend; backends that can: reference; decode=cuda takes what",
    ):
        support.choose("cuda", **ON_GPU)
    assert support.choose(**ON_GPU).decode == "triton"
    choice = support.choose("decode=cuda", **ON_GPU, features=["gqa"], group=16)
    assert str(choice) == "triton for store, cuda for decode, reference for extend"
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
        UnsupportedError, match="triton lacks store and decode with float64; extend"
    ):
        support.choose("triton", **asked)
    need = Need("decode", "bf16", "q8_0", 64, 64, 16, "cuda")
    with pytest.raises(UnsupportedError, match="for bf16 rows and unknown queries"):
        support.pick("cuda", [need])
    assert support.pick("cuda", [replace(need, query_dtype=torch.bfloat16)]) == "cuda"


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
