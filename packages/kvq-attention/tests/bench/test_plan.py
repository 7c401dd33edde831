import re

import pytest
import torch

import kvq_codecs
from kvq_attention import support
from kvq_attention.bench import plan
from kvq_attention.bench.plan import BASELINE, MIXED
from kvq_attention.errors import AttentionError, UnsupportedError


def test_bf16_is_measured_first_whatever_is_asked_for():
    assert plan(device="cpu").formats[0] == BASELINE
    assert [f.name for f in plan(device="cpu", codecs="q4_0,bf16,q8_0").formats] == [
        "bf16",
        "q4_0",
        "q8_0",
    ]


def test_by_itself_it_takes_every_codec_that_stores_the_head_dim_and_a_pair():
    wide, narrow = plan(device="cpu"), plan(device="cpu", shape="2/1x64")
    assert {f.name for f in wide.formats} == {*kvq_codecs.names(), MIXED.name}
    assert {f.name for f in wide.formats} - {f.name for f in narrow.formats} == {"iso3", "iso4"}


def test_a_codec_asked_for_by_name_is_not_left_out_in_silence():
    with pytest.raises(kvq_codecs.RowError, match="iso4"):
        plan(device="cpu", shape="2/1x64", codecs="iso4")


def test_quick_keeps_the_first_of_each_list():
    quick, whole = plan(device="cpu", quick=True), plan(device="cpu")
    assert quick.cases == whole.cases[:1]
    assert quick.store_tokens == whole.store_tokens[:1]
    assert [f.name for f in quick.formats] == ["bf16", "q8_0", "q4_0"]
    assert plan(device="cpu", quick=True, cases="1x8,2x8").cases[1].batch == 2


def test_the_recorded_command_asks_for_the_same_plan():
    asked = plan(device="cpu", codecs="k=q8_0,v=q4_0,fp8", cases="3x40", pages="32", repeat=7)
    assert plan(**given_by(asked.command)) == asked


def given_by(command):
    """What a command line gives to `plan`: an option that is said twice as a list."""
    said = {}
    for option, value in re.findall(r"--([a-z-]+) (\S+)", command):
        name = option.removeprefix("attention-").replace("-", "_")
        said.setdefault(name, []).append(value)
    kinds = {"backend": list, "repeat": lambda v: int(*v), "budget_seconds": lambda v: float(*v)}
    return {name: kinds.get(name, lambda v: v[0])(values) for name, values in said.items()}


@pytest.fixture
def everywhere(monkeypatch):
    """Every backend can run."""
    monkeypatch.setattr(support, "unavailable", lambda backend, device: None)


def test_several_backends_and_layers_are_one_plan(everywhere):
    shapes, backends = "4/2x128,2/2x128", ["triton", "decode=reference,store=triton"]
    asked = plan(device="cpu", shape=shapes, backend=backends, codecs="q4_0")
    assert [shape.name for shape in asked.shapes] == shapes.split(",")
    assert asked.backends == tuple(backends)
    assert plan(**given_by(asked.command)) == asked
    spot = next(asked.spots)
    assert asked.ways("decode", spot) == {"triton": "triton", "reference": "reference"}
    assert asked.ways("store", spot) == {"triton": "triton"}
    assert plan(device="cpu", backend=["auto", "auto"]).backends == ("auto",)


def test_auto_beside_the_backend_that_it_takes_is_that_backend(everywhere):
    asked = plan(device="cpu", backend=["auto", "reference", "triton"])
    names = {"reference": "auto", "triton": "triton"}
    assert asked.ways("decode", next(asked.spots)) == names


def test_what_one_of_several_backends_does_not_serve_is_left_to_the_others(everywhere):
    # triton has pages of 16 tokens and none of 8
    asked = plan(device="cpu", backend=["triton", "reference"], pages="16,8", codecs="bf16")
    ways = {spot.page_tokens: list(asked.ways("decode", spot)) for spot in asked.spots}
    assert ways == {16: ["triton", "reference"], 8: ["reference"]}
    said = asked.not_served()
    assert [line.split(": ")[0] for line in said] == ["store of bf16", "decode of bf16"]
    assert "triton lacks decode for page_tokens 8 (has 16, 32, 64, 128)" in said[1]
    assert plan(device="cpu", backend="reference").not_served() == []
    with pytest.raises(UnsupportedError, match="triton lacks store for page_tokens 8 "):
        plan(device="cpu", backend=["triton", "reference"], pages="8")
    with pytest.raises(UnsupportedError, match=r"^cuda lacks store; backends that can"):
        plan(device="cpu", backend=["triton", "cuda"])
    with pytest.raises(UnsupportedError, match=r"^triton lacks store for page_tokens 8 .*: refe"):
        plan(
            device="cpu",
            backend=["triton", "store=triton,decode=reference"],
            pages="16,8",
        )


def test_without_a_gpu_it_says_what_is_needed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match=r"a GPU that torch can use .* --device cpu"):
        plan()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"device": "tpu"}, "cuda, cpu"),
        ({"backend": "fast"}, "auto, cuda, triton, reference"),
        ({"backend": "read=triton"}, "'read' is no operation here; there are store, decode and co"),
        ({"backend": "extend=reference"}, "'extend' is no operation here; there are store, decode"),
        ({"backend": "extend=cuda"}, "'extend' is no operation here; there are store, decode and"),
        ({"backend": "store=reference,store=auto"}, "'store=reference,store=auto': store is na"),
        ({"backend": "decode=cuda"}, "^decode: cuda cannot run on cpu: .*; backends that can: "),
        ({"backend": "copy_pages=cuda"}, "^copy_pages: cuda lacks copy_pages; backends that can"),
        ({"repeat": 0}, "^--repeat must be at least 1, got 0$"),
        ({"budget_seconds": float("nan")}, "^--budget-seconds must be above 0, got nan$"),
        ({"budget_seconds": 0.0}, "^--budget-seconds must be above 0, got 0.0$"),
        ({"jobs": -1}, "^--jobs must be at least 0, got -1$"),
        ({"shape": "1/1x65537"}, "head_dim must be at most 65,536, got 65,537"),
        ({"pages": "9" * 5000}, "must be positive integers"),
    ],
)
def test_what_cannot_be_measured_is_refused(wrong, said):
    with pytest.raises(AttentionError, match=said):
        plan(**{"device": "cpu"} | wrong)


def test_a_backend_that_does_not_serve_the_plan_is_refused_with_what_it_lacks(monkeypatch):
    monkeypatch.setattr(support, "unavailable", lambda backend, device: None)
    with pytest.raises(UnsupportedError, match=r"triton lacks store and decode for page_tokens 8 "):
        plan(device="cpu", backend="triton", pages="16,8")
    assert plan(device="cpu", backend="triton", pages="16,32").backends == ("triton",)
    assert plan(device="cpu", pages="16,8").page_tokens == (16, 8)
    reasons = {"cuda": "no GPU", "triton": "no interpreter", "reference": None}
    monkeypatch.setattr(support, "unavailable", lambda backend, device: reasons[backend])
    with pytest.raises(UnsupportedError, match=r"triton cannot run on cpu: no interp.*: reference"):
        plan(device="cpu", backend="triton")
