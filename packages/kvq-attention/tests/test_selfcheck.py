"""The check that users run: it passes on what works and finds what does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import kvq_codecs
from kvq_attention import TensorError, UnsupportedError, reference, selfcheck, support
from kvq_attention.accuracy import MAX_ERROR
from kvq_attention.routes import Route
from kvq_attention.selfcheck import Outcome
from kvq_attention.trial import Layer, Trial
from kvq_attention.triton import backend as triton
from kvq_attention.triton.extending import dense, launch

from .decode.cases import ieee

SMALL = Layer(heads=4, kv_heads=2, head_dim=64)


def one(
    layer: Layer = SMALL, dtype: torch.dtype = torch.float32, k: str = "q8_0", v: str = "q4_0"
) -> Outcome:
    (outcome,) = selfcheck.run([(k, v)], layer, "cpu", dtype)
    return outcome


def test_every_codec_agrees_on_the_reference(device: str) -> None:
    formats = [(name, name) for name in kvq_codecs.names()]
    layer = Layer(heads=4, kv_heads=2)
    for outcome in selfcheck.run(formats, layer, device, torch.bfloat16, backend="reference"):
        assert outcome.problems == []
        assert outcome.backends == dict.fromkeys(support.OPS, "reference")
        assert outcome.errors.keys() == {*support.OPS}
        for op in ("decode", "extend"):
            assert 0 < outcome.errors[op] <= outcome.max_error == MAX_ERROR[torch.bfloat16]
        ran = dict.fromkeys(support.OPS, 1)
        assert outcome.launched["reference"] == ran


@pytest.mark.parametrize("page_tokens", [1, 16, 256])
def test_any_shape_and_two_codecs(page_tokens: int) -> None:
    outcome = one(Layer(heads=6, kv_heads=2, head_dim=96, page_tokens=page_tokens))
    assert outcome.name == "k=q8_0,v=q4_0"
    assert outcome.problems == []
    assert outcome.errors.keys() == {*support.OPS}


def test_a_codec_that_does_not_fit_is_said_to_be_untried() -> None:
    fits, other = selfcheck.run([("q8_0", "q8_0"), ("iso3",) * 2], SMALL, "cpu", torch.float32)
    assert fits.refused == {}
    assert other.backends == other.errors == other.launched == {}
    assert "not a multiple of 128" in other.refused["store"]
    assert other.problems == []


def test_what_no_backend_serves_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"head_dim 32 .*can: reference"):
        selfcheck.run(
            [("q8_0", "q8_0")], Layer(head_dim=32), "cuda", torch.float32, backend="triton"
        )
    with pytest.raises(UnsupportedError, match="unknown attention backend 'turbo'"):
        selfcheck.run([("q8_0", "q8_0")], SMALL, "cpu", torch.float32, backend="turbo")
    with pytest.raises(TensorError, match=r"heads a multiple of kv_heads, got 3/2x128"):
        Layer(heads=3, kv_heads=2)


def one_asked(backend: str, *formats: str, **more: Any) -> list[Outcome]:
    pairs = [(name, name) for name in formats]
    return selfcheck.run(pairs, SMALL, "cpu", torch.float32, backend=backend, **more)


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trying anything fails the test."""
    monkeypatch.setattr(selfcheck.Trial, "of", lambda *_: pytest.fail("something was tried"))


@pytest.mark.parametrize("each", [True, False])
@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("decode=cuda", "^decode=cuda cannot be tried: cuda cannot run on cpu: .*that can: "),
        ("copy_pages=cuda", "^copy_pages=cuda cannot be tried: cuda lacks copy_pages; "),
        ("store=reference,decode=cuda", "^decode=cuda cannot be tried: cuda cannot run on cpu: "),
        (
            "store=cuda,decode=cuda,copy_pages=cuda",
            "^store=cuda cannot .*; decode=cuda cannot .*; copy_pages=cuda cannot be tried: cuda l",
        ),
        ("extend=cuda", "^extend=cuda cannot be tried: cuda lacks extend; .*that can: triton, ref"),
        ("encode=reference", "'encode' is no operation here; there are store, decode, extend and "),
        ("decode=reference,decode=auto", "decode is named twice"),
    ],
)
def test_an_operation_that_is_named_and_cannot_be_tried_is_refused(
    untried: None, backend: str, said: str, each: bool
) -> None:
    with pytest.raises(UnsupportedError, match=said):
        one_asked(backend, "q8_0", "q4_0", each=each)


def test_a_named_operation_is_tried_with_each_format_that_was_asked_for() -> None:
    """iso3 does not store rows of 64."""
    named = "store=reference,decode=reference"
    with pytest.raises(
        UnsupportedError,
        match=r"^store=reference cannot be tried with iso3: iso3: head_dim 64 is not .*; "
        "decode=reference cannot be tried with iso3: iso3: ",
    ):
        one_asked(named, "q8_0", "iso3")
    for backend, each in ((named, False), ("reference", True), ("decode=auto", True)):
        fits, other = one_asked(backend, "q8_0", "iso3", each=each)
        assert fits.errors.keys() == {*support.OPS} and not fits.problems
        assert other.refused.keys() == {*support.OPS}


def test_all_that_a_backend_lacks_is_told_at_once(untried: None) -> None:
    with pytest.raises(
        UnsupportedError,
        match=r"^cuda cannot run on cpu: its kernels run on cuda devices, .*; "
        r"it lacks store, extend and copy_pages; decode for .*; backends that can: .*reference$",
    ):
        one_asked("cuda", "q8_0", "fp32")


def test_bf16_rows_are_tried_with_queries_that_cuda_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "unavailable", lambda *_: None)
    (need,) = selfcheck.needs("decode", ("bf16", "bf16"), SMALL, "cuda", torch.bfloat16)
    assert support.pick("cuda", [need]) == "cuda"
    for dtype in (torch.float32, torch.float16):
        with pytest.raises(UnsupportedError, match=r"bf16 rows and float.* queries \(has bfloat16"):
            selfcheck.run(
                [("bf16", "q8_0")], SMALL, "cuda", dtype, backend="decode=cuda", each=False
            )


def test_a_layer_too_large_to_try_is_refused_by_its_limit() -> None:
    with pytest.raises(TensorError, match="page_tokens must be at most 65,536, got 65,537"):
        Layer(page_tokens=65_537)
    large = Layer(head_dim=65_536, page_tokens=65_536)
    with pytest.raises(TensorError, match=r"heads · head_dim · page_tokens must be at most 8,388"):
        selfcheck.run([("q8_0", "q8_0")], large, "cpu", torch.float32)


def wrong_byte(k: Any, v: Any, k_cache: Any, v_cache: Any, slots: torch.Tensor) -> None:
    STORE(k, v, k_cache, v_cache, slots)
    page, offset = divmod(int(slots[5]), k_cache.lead[2])
    v_cache.planes["codes"][page, 1, offset, 3] ^= 1


def stray_row(k: Any, v: Any, k_cache: Any, v_cache: Any, slots: torch.Tensor) -> None:
    STORE(k, v, k_cache, v_cache, slots.clamp(min=0))


def larger(*args: Any) -> torch.Tensor:
    return DECODE(*args) * 1.01


def one_nan(*args: Any) -> torch.Tensor:
    out = DECODE(*args)
    out[1, 0, 0] = torch.nan
    return out


def only_k(caches: Any, source: torch.Tensor, target: torch.Tensor) -> None:
    COPY(caches[:1], source, target)


def breaks(*args: Any) -> None:
    raise RuntimeError("no kernel image")


def does_nothing(*args: Any) -> None:
    return None


def reads_what_is_stored(q: Any, k: Any, v: Any, *rest: Any) -> torch.Tensor:
    return DECODE(q, *rest[:-1])


def misses_the_past(
    q: Any, k: Any, v: Any, k_cache: Any, v_cache: Any, batch: Any, *rest: Any
) -> Any:
    steps = torch.diff(batch.query_offsets)
    return EXTEND(q, k, v, k_cache, v_cache, replace(batch, seq_lens=steps), *rest)


STORE, DECODE, COPY = reference.store, reference.decode, reference.copy_pages
EXTEND = reference.extend


@pytest.mark.parametrize(
    ("op", "instead", "said"),
    [
        ("store", wrong_byte, ["1 rows do not hold the bytes they must"]),
        ("decode", larger, ["error 0.01 against attention in float64, at most 0.002"]),
        ("decode", one_nan, ["error inf against"]),
        ("copy_pages", only_k, ["64 rows do not hold"]),
        (
            "extend",
            reads_what_is_stored,
            ["error inf against", "it was launched 0 times"],
        ),
        ("extend", misses_the_past, ["error "]),
        ("decode", breaks, ["failed: RuntimeError: no kernel image"]),
        (
            "copy_pages",
            does_nothing,
            ["128 rows", "it was launched 0 times"],
        ),
    ],
)
def test_what_is_wrong_is_found(
    monkeypatch: pytest.MonkeyPatch, op: str, instead: Callable[..., Any], said: list[str]
) -> None:
    monkeypatch.setattr(reference, op, instead)
    problems = one().problems
    assert len(problems) == len(said)
    for problem, words in zip(problems, said, strict=True):
        assert problem.startswith(f"{op} of reference, k=q8_0,v=q4_0, 4/2x64, pages of 16: {words}")


def test_a_stray_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "store", stray_row)
    (problem,) = one().problems
    assert problem.startswith("store of reference, ")


ALL = Layer(heads=4, kv_heads=2, head_dim=64, window=512, softcap=50.0, sinks=True)
WITHOUT = {"window": {"window": None}, "softcap": {"softcap": None}, "sinks": {"sinks": None}}


@pytest.mark.parametrize("layer", [ALL, replace(ALL, queries=3)], ids=["decode", "verify"])
@pytest.mark.parametrize("page_tokens", [1, 16])
def test_a_model_s_window_soft_cap_and_sinks_are_tried(layer: Layer, page_tokens: int) -> None:
    outcome = one(replace(layer, page_tokens=page_tokens))
    assert outcome.problems == []
    assert outcome.errors.keys() == {*support.OPS}


@pytest.mark.parametrize("op", ["decode", "extend"])
@pytest.mark.parametrize("part", [*WITHOUT, "head_dim"])
def test_a_backend_that_ignores_how_scores_are_made_is_found(
    monkeypatch: pytest.MonkeyPatch, op: str, part: str
) -> None:
    right, other = getattr(reference, op), WITHOUT.get(part, {"scale": 1.0})
    monkeypatch.setattr(reference, op, lambda *args: right(*args[:-1], replace(args[-1], **other)))
    (problem,) = one(ALL).problems
    assert problem.startswith(
        f"{op} of reference, k=q8_0,v=q4_0, 4/2x64, pages of 16, window 512, soft cap 50, sinks: "
    )


def test_a_decode_that_is_not_causal_among_its_query_tokens_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def looks_ahead(q: Any, k: Any, v: Any, batch: Any, *rest: Any) -> torch.Tensor:
        last = DECODE(q, k, v, batch, *rest)
        return last.where(torch.arange(len(q))[:, None, None] != 3, last[4])

    monkeypatch.setattr(reference, "decode", looks_ahead)
    (problem,) = one(replace(SMALL, queries=3)).problems
    assert problem.startswith(
        "decode of reference, k=q8_0,v=q4_0, 4/2x64, pages of 16, 3 query tokens: error "
    )
    with pytest.raises(TensorError, match=r"queries must be 1 … 3 in a trial, got 4"):
        replace(SMALL, queries=4)


def test_a_large_layer_has_a_small_form_with_the_same_group() -> None:
    assert Layer().small() == Layer()
    large = Layer(heads=64, kv_heads=16, head_dim=256, page_tokens=128, window=7)
    assert large.small() == replace(large, heads=4, kv_heads=1)
    assert replace(large, page_tokens=32).small() == replace(
        large, page_tokens=32, heads=16, kv_heads=4
    )


def test_backends_that_are_chosen_already_are_tried_and_no_others() -> None:
    chosen = {"store": "reference", "extend": "reference"}
    outcome = selfcheck.run_one(("q8_0", "q4_0"), SMALL, chosen, "cpu", torch.float32)
    assert outcome.problems == []
    assert outcome.errors.keys() == chosen.keys()
    assert outcome.launched["reference"] == {"store": 1, "decode": 0, "extend": 1, "copy_pages": 0}


@pytest.fixture
def interpreted() -> None:
    """Triton's kernels run on this CPU."""
    if support.unavailable("triton", "cpu"):
        pytest.skip("Triton's interpreter is off")


def by_triton(k: str = "q8_0", v: str = "q4_0", layer: Layer = SMALL) -> Outcome:
    return selfcheck.run_one((k, v), layer, {"extend": "triton"}, "cpu", torch.float32)


@ieee
def test_each_way_in_which_a_backend_extends_is_tried(interpreted: None) -> None:
    outcome = by_triton()
    assert outcome.problems == []
    assert [route.name for route in outcome.routes] == ["loop", "scratch", "dense"]
    errors = [route.error or 0.0 for route in outcome.routes]
    assert min(errors) > 0 and outcome.errors["extend"] == max(errors) <= outcome.max_error
    assert outcome.launched["triton"]["extend"] == 3
    assert one().routes == [], "the reference has one way"


@ieee
@pytest.mark.parametrize("name", ["scratch", "dense"])
def test_a_step_may_have_as_many_rows_as_a_way_asks_for(
    monkeypatch: pytest.MonkeyPatch, interpreted: None, name: str
) -> None:
    trial = Trial.of(("q8_0", "q4_0"), SMALL, "cpu", torch.float32)
    route = Route(name, 40)
    with pytest.raises(UnsupportedError, match=r"^(nothing of this step goes|dense kernels take)"):
        trial.extend("triton", route)
    assert 0 < trial.extend("triton", route, 20) <= MAX_ERROR[torch.float32]
    real = dense.extend_densely if name == "dense" else launch.extend_through
    monkeypatch.setattr(dense, "extend_densely", lambda *given: skipped.append(real))
    monkeypatch.setattr(launch, "extend_through", lambda *given: skipped.append(real))
    skipped: list[Any] = []
    trial.extend("triton", route, 20)
    assert skipped == [real], "one request of that many rows"


@ieee
def test_a_way_that_a_layer_or_a_format_cannot_take_is_no_problem(interpreted: None) -> None:
    plain, capped = by_triton("bf16", "bf16"), by_triton(layer=replace(SMALL, softcap=3.0))
    for outcome, name, words in ((plain, "scratch", "packed"), (capped, "dense", "no soft cap")):
        assert outcome.problems == []
        (refused,) = (route for route in outcome.routes if route.refused)
        assert refused.name == name and words in str(refused.refused)
        assert refused.error is refused.failed is None


@ieee
@pytest.mark.parametrize("bad", ["loop", "scratch", "dense"])
def test_the_way_that_is_wrong_is_named(
    monkeypatch: pytest.MonkeyPatch, interpreted: None, bad: str
) -> None:
    def wrong(*args: Any, route: Route) -> torch.Tensor:
        return launch.extend(*args, route=route) * (1.5 if route.name == bad else 1)

    def broken(*args: Any, route: Route) -> torch.Tensor:
        if route.name == bad:
            raise RuntimeError("no kernel image")
        return launch.extend(*args, route=route)

    where = f"extend of triton ({bad}), k=q8_0,v=q4_0, 4/2x64, pages of 16: "
    for instead, said in (
        (wrong, "error 0.5 against attention in float64"),
        (broken, "failed: RuntimeError: no kernel image"),
    ):
        monkeypatch.setattr(triton, "extend", instead)
        (problem,) = by_triton().problems
        assert problem.startswith(where + said)


def test_a_way_that_a_backend_lacks_is_refused() -> None:
    trial = Trial.of(("q8_0", "q4_0"), SMALL, "cpu", torch.float32)
    with pytest.raises(UnsupportedError, match="reference has no route 'loop'; it has one way"):
        trial.extend("reference", Route("loop"))
