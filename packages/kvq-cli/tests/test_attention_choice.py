"""Which backend a model gets is told before its weights load, and never changed silently."""

import re
from dataclasses import replace

import pytest
import torch
from tiny_models import Letters, llama, mistral

import kvq_codecs
from kvq_attention import UnsupportedError, support
from kvq_cli import compose
from kvq_cli.compose import ServeOptions, build_engine
from kvq_cli.config import geometry
from kvq_cli.models.loader import LoadedModel

REASONS = [
    (
        {},
        32,
        r"triton lacks store, decode and extend for head_dim 32 \(has 64, 80, 96, 112, 128, 19",
    ),
    ({"page_tokens": 1}, 64, r"store, decode and extend for page_tokens 1 \(has 16, 32, 64, 128\)"),
    (
        {"page_tokens": 256},
        64,
        r"store, decode and extend for page_tokens 256 .*that can: reference$",
    ),
]


@pytest.fixture
def saved(tmp_path):
    """Save a tiny model; returns the options that serve it."""

    def save(model, **options):
        model.save_pretrained(tmp_path)
        common = {"device": "cpu", "num_tokens": 512, "kv_cache_dtype": "q8_0"}
        return ServeOptions(str(tmp_path), **{**common, **options})

    return save


@pytest.fixture
def unloaded(monkeypatch):
    """Loading weights fails the test."""

    def load(*_, **__):
        pytest.fail("weights were loaded")

    monkeypatch.setattr(compose, "load", load)


@pytest.fixture
def auto_takes_triton(monkeypatch):
    """On this CPU too, so that what is said on a GPU is said here."""
    monkeypatch.setattr(support, "NEVER_AUTO", set())
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter is off where there is a GPU")


@pytest.mark.parametrize(("options", "head_dim", "reason"), REASONS)
def test_p086_an_explicit_backend_is_refused_with_the_reason_before_weights_load(
    saved, unloaded, options, head_dim, reason
):
    with pytest.raises(UnsupportedError, match=reason):
        build_engine(saved(llama(head_dim=head_dim), attention_backend="triton", **options))


def test_an_unknown_backend_is_refused_with_those_there_are(saved, unloaded):
    there_are = "there are auto, cuda, triton, reference"
    with pytest.raises(UnsupportedError, match=f"'turbo'; {there_are}, and OP=NAME"):
        build_engine(saved(llama(), attention_backend="turbo"))
    with pytest.raises(UnsupportedError, match=f"'decode=turbo': .*; {there_are}$"):
        build_engine(saved(llama(), attention_backend="decode=turbo"))


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        (
            "copy_pages=cuda",
            "'copy_pages' is no operation here; there are store, decode and extend",
        ),
        ("copy_pages=reference", "'copy_pages' is no operation here; there are store, decode and "),
        ("decode=reference,decode=auto", "decode is named twice"),
        ("extend=cuda,store=cuda", "^store: cuda lacks store; .*; extend: cuda lacks extend; "),
    ],
)
def test_what_a_model_has_no_use_for_is_refused_before_weights_load(saved, unloaded, backend, said):
    with pytest.raises(UnsupportedError, match=said):
        build_engine(saved(llama(), attention_backend=backend))


def test_each_operation_may_be_asked_for(saved, monkeypatch):
    model = llama(head_dim=64)
    monkeypatch.setattr(
        compose,
        "load",
        lambda *_, **__: LoadedModel(model, Letters(), geometry(model.config.to_dict()), "tiny"),
    )
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter is off where there is a GPU")
    summary = build_engine(saved(model, attention_backend="decode=triton")).summary
    chosen = {"store": "reference", "decode": "triton", "extend": "reference"}
    assert summary.attention == chosen
    summary = build_engine(saved(model, attention_backend="triton")).summary
    assert summary.attention == dict.fromkeys(support.MODEL_OPS, "triton")


def test_cuda_decodes_no_more_than_sixteen_query_heads_a_kv_head(monkeypatch):
    monkeypatch.setattr(support, "unavailable", lambda *_: None)
    options = ServeOptions("tiny", attention_backend="decode=cuda")
    shape = geometry(llama(head_dim=64).config.to_dict())

    def chosen(heads):
        shared = replace(shape, num_heads=heads, num_kv_heads=1)
        device = torch.device("cuda")
        return compose.choose_cache("q8_0", shared, options, device, torch.float32).backends

    assert chosen(16).decode == "cuda"
    with pytest.raises(UnsupportedError, match=r"^decode: cuda lacks decode for 17 query h"):
        chosen(17)


def test_p064_keys_and_values_of_any_two_formats_have_a_kernel_on_a_gpu(monkeypatch):
    """None is left to slow attention in silence; what is taken is said at the start."""
    monkeypatch.setattr(support, "unavailable", lambda *_: None)
    shape = geometry(llama(head_dim=128).config.to_dict())
    options, device = ServeOptions("tiny"), torch.device("cuda")
    for k in kvq_codecs.names():
        for v in kvq_codecs.names():
            cache_dtype = f"k={k},v={v}"
            choice = compose.choose_cache(cache_dtype, shape, options, device, torch.bfloat16)
            assert set(choice.backends.by_op().values()) <= {"triton", "cuda"}, cache_dtype
            assert not choice.backends.passed_over


@pytest.mark.parametrize(
    ("make", "options", "attention", "passed_over"),
    [
        (lambda: llama(head_dim=64), {}, "triton", None),
        (lambda: mistral(head_dim=64), {"page_tokens": 32}, "triton", None),
        (
            llama,
            {},
            "reference",
            r"triton lacks store, decode and extend for head_dim 32 \(has 64, ",
        ),
        (
            lambda: llama(head_dim=64),
            {"page_tokens": 256},
            "reference",
            r"triton lacks store, decode and extend for page_tokens 256 \(has 16, 32, 64, 128\)",
        ),
    ],
)
def test_p066_auto_says_what_it_took_and_what_it_passed_over(
    saved, monkeypatch, auto_takes_triton, make, options, attention, passed_over
):
    model, said = make(), []

    def load(source, **_):
        assert said[0].startswith("attention: ")
        return LoadedModel(model, Letters(), geometry(model.config.to_dict()), "tiny")

    monkeypatch.setattr(compose, "load", load)
    summary = build_engine(saved(model, **options), said.append).summary
    assert summary.attention == dict.fromkeys(support.MODEL_OPS, attention)
    assert summary.weights == "float32 on cpu"
    noted = [note for note in summary.notes if "attention" in note]
    assert len(noted) == (passed_over is not None)
    for note in noted:
        assert re.search(f"not all attention is as fast as it could be: {passed_over}", note)
    assert said[0] == f"attention: {attention}"
