"""A cache of bf16 that CUDA cannot decode beside a model's queries is refused, not tried."""

import re
import sys
from dataclasses import replace
from types import ModuleType

import httpx
import pytest
import torch
from http_server import client_of, serving
from tiny_models import (
    LAYERS_4_2,
    SMALL,
    greedy,
    llama,
    make_async_engine,
    make_engine,
    random_prompt,
    run,
    tokens_of,
)
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from kvq_attention import UnsupportedError, crossovers, launches, reference, support
from kvq_cli import compose
from kvq_cli.compose import ServeOptions, build_engine
from kvq_cli.main import app
from kvq_cli.models.attention import StepContext
from kvq_pools import RebuildRejected

BF16 = ["bf16", "k=bf16,v=q8_0", "k=q8_0,v=bf16", "0:bf16,1-:q8_0", "0:q8_0,1-:k=q4_0,v=bf16"]
REASON = r"cuda lacks decode .*for bf16 rows and float(32|16) queries \(has bfloat16\)"
PROMPT = random_prompt(20)
FAMILIES = [
    *("llama", "smollm3", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    *("gemma2", "gemma3_text", "phi3", "olmo2", "granite"),
]


@pytest.fixture(autouse=True)
def cuda_here(monkeypatch):
    """CUDA's rows hold on this CPU; the reference computes what its kernels would."""

    count = launches.record

    def decode(q, *args):
        with pytest.MonkeyPatch.context() as counted:
            counted.setattr(launches, "record", lambda _, op: count("cuda", op))
            return reference.decode(q, *args)

    module = ModuleType("cuda_by_reference")
    module.unavailable = lambda _: None
    module.decode = decode
    monkeypatch.setitem(sys.modules, "cuda_by_reference", module)
    monkeypatch.setitem(support.BACKENDS, "cuda", "cuda_by_reference")
    here = [replace(row, devices=None) if row.backend == "cuda" else row for row in support.SUPPORT]
    monkeypatch.setattr(support, "SUPPORT", tuple(here))


@pytest.fixture
def model_dir(tmp_path):
    llama(head_dim=64).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.fixture
def unloaded(monkeypatch):
    """Loading weights is told and goes no further."""

    class Loaded(Exception):
        pass

    def load(*_, **__):
        raise Loaded

    monkeypatch.setattr(compose, "load", load)
    return Loaded


def cuda_engine(**options):
    sizes = {"page_tokens": 16, "max_prefill_tokens": 16, "num_pages": 32}
    return make_engine(llama(head_dim=64), **sizes, attention_backend="decode=cuda", **options)


@pytest.mark.parametrize("cache", BF16)
@pytest.mark.parametrize("dtype", ["float32", "float16", "auto"])
def test_serve_refuses_before_weights_load(model_dir, unloaded, cache, dtype):
    options = {"device": "cpu", "num_tokens": 512, "kv_cache_dtype": cache, "dtype": dtype}
    with pytest.raises(UnsupportedError, match=f"^decode: {REASON}; backends that can: .*refer"):
        build_engine(ServeOptions(model_dir, **options, attention_backend="decode=cuda"))
    for served in (
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "q8_0"},
        {"attention_backend": "auto"},
    ):
        given = {"attention_backend": "decode=cuda", **options, **served}
        with pytest.raises(unloaded):
            build_engine(ServeOptions(model_dir, **given))


def test_the_command_ends_with_2_and_one_line(model_dir, unloaded):
    options = ["--port", "0", "--device", "cpu", "--num-tokens", "512", "--kv-cache-dtype", "bf16"]
    done = CliRunner().invoke(
        app, ["serve", model_dir, *options, "--attention-backend", "decode=cuda"]
    )
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: decode: cuda lacks decode for bf16 rows and float32 queries")


def test_auto_goes_on_to_another_and_says_why(monkeypatch):
    monkeypatch.setattr(crossovers, "fastest", lambda _, needs: next(iter(needs)).op == "decode")
    sizes = {"page_tokens": 16, "max_prefill_tokens": 16, "num_pages": 32}
    model = llama(head_dim=64)
    engine = make_engine(model, **sizes, cache="q8_0")
    assert engine.runner.backends.decode == "cuda"
    engine.rebuild(cache_dtype="bf16")
    assert str(engine.runner.backends) == "reference"
    (said,) = engine.runner.backends.passed_over
    assert re.match(REASON, said)
    with launches.counting() as launched:
        tokens = tokens_of(run(engine, {"r": (PROMPT, greedy(8))})["r"])
    assert len(tokens) == 8 and not any(launched["cuda"].values())
    engine.rebuild(cache_dtype="fp16")
    assert engine.runner.backends.decode == "cuda"


@pytest.mark.parametrize("cache", BF16)
def test_a_rebuild_is_refused_and_the_old_cache_serves_on(cache):
    engine = cuda_engine(cache="q8_0")
    want = tokens_of(run(engine, {"r": (PROMPT, greedy(8))})["r"])
    with pytest.raises(RebuildRejected, match=REASON):
        engine.rebuild(cache_dtype=cache)
    assert engine.cache.choice.cache_dtype == "q8_0"
    assert engine.runner.backends.decode == "cuda"
    with launches.counting() as launched:
        again = tokens_of(run(engine, {"r": (PROMPT, greedy(8))})["r"])
    assert again == want
    assert launched["cuda"]["decode"] > 0


def test_an_operator_who_asks_for_it_loses_nothing():
    with serving(make_async_engine(cuda_engine(cache="q8_0"))) as url:

        def answer():
            with client_of(url) as client:
                done = client.completions.create(
                    model="tiny", prompt=PROMPT, max_tokens=8, temperature=0
                )
                return done.choices[0].text

        before = answer()
        done = CliRunner().invoke(app, ["ctl", "cache", "--url", url, "--kv-cache-dtype", "bf16"])
        assert done.exit_code == 2, done.output
        (line,) = done.stderr.splitlines()
        assert "cuda lacks decode for bf16 rows and float32 queries (has bfloat16)" in line
        assert httpx.get(f"{url}/health").status_code == 200
        assert answer() == before
        done = CliRunner().invoke(app, ["ctl", "cache", "--url", url, "--kv-cache-dtype", "q4_0"])
        assert done.exit_code == 0, done.output


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_queries_have_the_dtype_of_the_weights(family, dtype, monkeypatch):
    """Which is what backends are chosen by."""
    seen, attend = set(), StepContext.attend

    def noting(self, layer, q, k, v, options):
        seen.update((q.dtype, k.dtype, v.dtype))
        return attend(self, layer, q, k, v, options)

    monkeypatch.setattr(StepContext, "attend", noting)
    config = AutoConfig.for_model(family, **SMALL, **LAYERS_4_2, head_dim=32)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    run(make_engine(model, cache="q8_0"), {"r": (PROMPT, greedy(3))})
    assert seen == {dtype}


def test_a_model_of_bf16_is_rebuilt_in_bf16():
    model = llama(head_dim=64).bfloat16()
    sizes = {"page_tokens": 16, "max_prefill_tokens": 16, "num_pages": 32}
    engine = make_engine(model, **sizes, cache="q8_0", attention_backend="decode=cuda")
    engine.rebuild(cache_dtype="bf16")
    with launches.counting() as launched:
        assert len(run(engine, {"r": (PROMPT, greedy(8))})["r"]) == 8
    assert launched["cuda"]["decode"] > 0
