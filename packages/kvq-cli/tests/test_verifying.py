"""Kernels are tried before a model is served, and one that fails does not serve."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import Letters, gemma, llama, make_engine

from kvq_attention import launches, reference, support
from kvq_attention.layer import Layer
from kvq_cli import compose
from kvq_cli.commands.screen import Screen
from kvq_cli.compose import ServeOptions, build_engine
from kvq_cli.config import CacheFormat, ConfigError, geometry, parse_formats
from kvq_cli.models.loader import LoadedModel
from kvq_cli.server.kv_protocol import Status
from kvq_cli.server.limits import HttpOptions
from kvq_cli.verifying import KernelFailed, cases
from kvq_pools import RebuildRejected

DECODE = reference.decode


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ServeOptions]:
    """The options that serve a tiny model, whose weights are not read from disk."""

    def saved(make: Any = llama, **options: Any) -> ServeOptions:
        model = make(head_dim=64)
        model.save_pretrained(tmp_path)
        loaded = LoadedModel(model, Letters(), geometry(model.config.to_dict()), "tiny")
        monkeypatch.setattr(compose, "load", lambda *_, **__: loaded)
        common = {"device": "cpu", "num_tokens": 512, "kv_cache_dtype": "q8_0"}
        return ServeOptions(str(tmp_path), **{**common, **options})

    return saved


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, loading weights fails the test."""
    return lambda: monkeypatch.setattr(compose, "load", lambda *_, **__: pytest.fail("loaded"))


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference decodes something else."""
    monkeypatch.setattr(reference, "decode", lambda *args: 1.5 * DECODE(*args))


@pytest.fixture
def auto_takes_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this CPU too."""
    monkeypatch.setattr(support, "NEVER_AUTO", set())
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter is off where there is a GPU")


def test_each_kind_of_layer_is_a_case() -> None:
    shape = replace(geometry(gemma(head_dim=64).config.to_dict()), softcap=50.0)
    full = Layer(heads=2, kv_heads=1, head_dim=64, softcap=50.0)
    window = replace(full, window=24)
    q8, q4 = CacheFormat("q8_0", "q8_0"), CacheFormat("q4_0", "q4_0")
    found = cases(shape, q8, 16, "own")
    assert [(case.cache, case.layer, [*case.ops]) for case in found] == [
        (q8, window, ["store", "decode", "extend"]),
        (q8, full, ["decode", "extend"]),  # its rows are stored in the same way
    ]
    found = cases(shape, parse_formats("0-1:q8_0,2-:q4_0", shape), 16, "own")
    assert [(case.cache, case.layer) for case in found] == [
        (q8, window), (q8, full), (q4, window), (q4, full),
    ]  # fmt: skip
    assert [[*case.ops] for case in found[2:]] == [[*support.MODEL_OPS], ["decode", "extend"]]


def test_a_prefill_that_reads_packed_is_a_decode_by_the_backend_of_extends() -> None:
    shape = geometry(llama(head_dim=64).config.to_dict())
    one, several = cases(shape, CacheFormat("q8_0", "q4_0"), 16, "packed")
    assert one.ops == {"store": "store", "decode": "decode"}
    assert several.ops == {"decode": "extend"}
    assert several.layer == replace(one.layer, queries=3, any_cut=True)
    backends = support.Choice(store="reference", decode="reference", extend="reference")
    outcome = several.run(backends, "cpu", torch.float32)
    assert not outcome.problems
    assert outcome.launched["reference"] == {"store": 0, "decode": 1, "extend": 0, "copy_pages": 0}


@pytest.mark.parametrize(("make", "kernels"), [(llama, 3), (gemma, 5)])
def test_serving_starts_with_a_check_and_says_so(
    tiny: Any, make: Any, kernels: int, capsys: Any
) -> None:
    said: list[str] = []
    with launches.counting() as counted:
        engine = build_engine(tiny(make), said.append)
    assert sum(counted["reference"].values()) == kernels
    check = engine.summary.attention_check
    assert check is not None and (check.kernels, check.fallbacks) == (kernels, ())
    assert check.seconds < 5
    words = f"{kernels} kernels agree with the formats' definition, in {check.seconds:.1f} s"
    assert said[:2] == ["attention: reference", f"attention checked: {words}"]
    assert said[2].startswith("loading ")
    Screen().announce(engine, "http://127.0.0.1:1", HttpOptions())
    assert re.search(rf"checked +{re.escape(words)}", capsys.readouterr().out)
    status = Status.of("ready", None, *engine.snapshot)
    assert status.attention_check is not None
    assert status.attention_check.model_dump() == {
        "kernels": kernels, "seconds": check.seconds, "fallbacks": [],
    }  # fmt: skip


@pytest.mark.parametrize("reads", ["own", "packed"])
def test_a_kernel_that_fails_is_refused_by_name_before_weights_load(
    tiny: Any, unloaded: Any, broken: None, reads: str
) -> None:
    options = tiny(kv_cache_dtype="k=q8_0,v=q4_0", prefill_reads=reads)
    unloaded()
    with pytest.raises(
        KernelFailed,
        match=r"^decode of reference, k=q8_0,v=q4_0, 4/2x64, pages of 16: error 0\.5 against "
        r"attention in float64, at most 0\.002 is allowed.*No other backend serves \w+ of this "
        r"model here: tried reference$",
    ):
        build_engine(options)


def test_a_kernel_that_ends_with_an_exception_is_refused_likewise(
    tiny: Any, unloaded: Any, monkeypatch: pytest.MonkeyPatch, auto_takes_triton: None
) -> None:
    def breaks(*_: Any) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(reference, "extend", breaks)
    options = tiny(attention_backend="reference")
    unloaded()
    with pytest.raises(
        KernelFailed,
        match=r"^extend of reference, q8_0, 4/2x64, pages of 16: failed: RuntimeError: no kernel "
        r"image\. Answers would be wrong: name another backend \(--attention-backend "
        r"extend=triton\) or let --on-failed-check fallback take the next one that passes; "
        r"`kvq check MODEL` tries all that a model runs$",
    ):
        build_engine(options)


def test_a_fallback_is_taken_only_if_asked_for_and_named(
    tiny: Any, broken: None, auto_takes_triton: None
) -> None:
    said: list[str] = []
    options = tiny(attention_backend="reference", on_failed_check="fallback")
    engine = build_engine(options, said.append)
    taken = {"store": "reference", "decode": "triton", "extend": "reference"}
    assert engine.summary.attention == taken
    words = (
        "decode is computed by triton instead: decode of reference, q8_0, 4/2x64, pages of 16: "
        "error 0.5 against attention in float64, at most 0.002 is allowed"
    )
    assert said[1].endswith(f" s; {words}")
    assert words in engine.summary.notes
    status = Status.of("ready", None, *engine.snapshot)
    assert status.attention == taken
    assert status.attention_check is not None and status.attention_check.fallbacks == [words]


def test_there_is_room_for_what_is_taken_before_weights_load(
    tiny: Any, unloaded: Any, broken: None, monkeypatch: pytest.MonkeyPatch, auto_takes_triton: None
) -> None:
    """The reference decodes a whole context, which kernels do not."""

    def checked(room: Any, choice: Any) -> None:
        if choice.backends.decode == "triton":
            raise ConfigError("no room for what was taken")

    monkeypatch.setattr(compose, "check_context", checked)
    unloaded()
    with pytest.raises(ConfigError, match="no room for what was taken"):
        build_engine(tiny(attention_backend="reference", on_failed_check="fallback"))


def test_a_fallback_that_fails_too_is_refused(
    tiny: Any, unloaded: Any, broken: None, monkeypatch: pytest.MonkeyPatch, auto_takes_triton: None
) -> None:
    from kvq_attention.triton import backend

    monkeypatch.setattr(backend, "decode", lambda *args: 1.5 * DECODE(*args))
    options = tiny(attention_backend="reference", on_failed_check="fallback")
    unloaded()
    with pytest.raises(
        KernelFailed, match=r"^decode of triton, .*No other backend .*: tried reference, triton$"
    ):
        build_engine(options)


def test_a_rebuild_into_a_format_whose_kernel_fails_is_refused_and_the_old_one_serves_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(llama(head_dim=64), cache="q8_0", page_tokens=16)

    def wrong(q: Any, k_cache: Any, *rest: Any) -> torch.Tensor:
        return DECODE(q, k_cache, *rest) * (2 if k_cache.spec.name == "q4_0" else 1)

    monkeypatch.setattr(reference, "decode", wrong)
    with pytest.raises(RebuildRejected, match=r"^decode of reference, q4_0, 4/2x64, pages of 16"):
        engine.rebuild(cache_dtype="q4_0")
    assert engine.cache.choice.cache_dtype == "q8_0"
    engine.rebuild(cache_dtype="fp8")
    check = engine.cache.choice.check
    assert check is not None and check.kernels == 3


def test_other_words_are_refused() -> None:
    with pytest.raises(ConfigError, match="on_failed_check must be refuse or fallback, got 'skip'"):
        ServeOptions("demo", on_failed_check="skip")


FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


@pytest.fixture
def declaring(tiny: Any) -> Callable[..., ServeOptions]:
    """The options that serve a model whose checkpoint declares an fp8 cache."""

    def saved(**options: Any) -> ServeOptions:
        given: ServeOptions = tiny(**{"kv_cache_dtype": "auto", **options})
        file = Path(given.model) / "config.json"
        quantization = {"quant_method": "compressed-tensors", "kv_cache_scheme": FP8}
        config = {**json.loads(file.read_text()), "quantization_config": quantization}
        file.write_text(json.dumps(config))
        return given

    return saved


def test_p128_a_declared_format_is_reported_and_can_be_overridden(declaring: Any) -> None:
    for asked, taken, words in (
        ({}, "fp8", "it is stored as fp8"),
        ({"kv_cache_dtype": "q4_0"}, "q4_0", "q4_0 is used, as asked"),
    ):
        said: list[str] = []
        summary = build_engine(declaring(**asked), said.append).summary
        assert summary.cache_dtype == taken
        assert said[0].startswith("the checkpoint declares its KV cache's format (kv_cache_scheme ")
        assert words in said[0]
        assert said[0] in summary.notes


def test_p128_a_declared_format_is_checked_against_the_device(
    declaring: Any, unloaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(q: Any, k_cache: Any, *rest: Any) -> torch.Tensor:
        return DECODE(q, k_cache, *rest) * (2 if k_cache.spec.name == "fp8" else 1)

    monkeypatch.setattr(reference, "decode", wrong)
    build_engine(declaring(kv_cache_dtype="q8_0"))
    options = declaring()
    unloaded()
    with pytest.raises(KernelFailed, match=r"^decode of reference, fp8, 4/2x64"):
        build_engine(options)


@pytest.mark.parametrize("reads", ["own", "packed"])
@pytest.mark.parametrize("asked", ["nvfp4", "k=q8_0,v=nvfp4"])
def test_p028_attention_that_reads_nvfp4_wrongly_never_answers(
    tiny: Any, unloaded: Any, monkeypatch: pytest.MonkeyPatch, asked: str, reads: str
) -> None:
    """Empty answers of a model that was served all the same: it is refused at the start instead."""

    def without_block_scales(*args: Any) -> torch.Tensor:
        q, k_cache, v_cache, *rest = args
        planes = dict(v_cache.planes)
        if "block_scale" in planes:
            planes["block_scale"] = torch.full_like(planes["block_scale"], 0x38)  # 1.0 in e4m3
        return DECODE(q, k_cache, replace(v_cache, planes=planes), *rest)

    options = tiny(kv_cache_dtype=asked, prefill_reads=reads)
    monkeypatch.setattr(reference, "decode", without_block_scales)
    unloaded()
    with pytest.raises(KernelFailed, match=rf"decode of reference, {re.escape(asked)}"):
        build_engine(options)
