import sys
from dataclasses import replace

import pytest
import torch

from kvq_attention import launches
from kvq_attention.bench import plan, profiled
from kvq_attention.bench.cases import Case
from kvq_attention.errors import AttentionError

TINY = ("--device", "cpu", "--case", "2x20", "--shape", "4/2x64")


@pytest.fixture
def command(monkeypatch):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["profiled", *arguments])
        return profiled.main()

    return run


def test_it_decodes_the_format_asked_for_once_before_and_once_under_the_profiler(
    command, monkeypatch
):
    seen = []
    real = profiled.empty_pool

    def empty_pool(formats, *rest):
        seen.append(formats.name)
        return real(formats, *rest)

    monkeypatch.setattr(profiled, "empty_pool", empty_pool)
    with launches.counting() as launched:
        assert command("k=q8_0,v=q4_0", *TINY) == 0
        assert command("bf16", *TINY) == 0
    assert launched["reference"]["decode"] == 4
    assert seen == ["k=q8_0,v=q4_0", "bf16"]


def test_what_it_gives_is_attention():
    chosen = plan(device="cpu", shape="4/2x64", codecs="q4_0", cases="2x20")
    out = profiled.decode_once(chosen, chosen.cases[0], [*chosen.spots][-1])
    assert out.shape == (2, 4, 64) and torch.isfinite(out).all()


def test_what_cannot_be_decoded_is_refused(command, capsys):
    assert command("q5_0", *TINY) == 2
    assert command("q4_0", *TINY, "--attention-backend", "cuda") == 2
    assert command("q4_0", *TINY, "--backend", "cuda") == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("error: unknown codec")
    assert said[1].startswith("error: decode: cuda cannot run on cpu")
    assert said[2:] == said[1:2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("q4_0,k=q8_0,v=q4_0",), "FORMAT names 2: q4_0, k=q8_0,v=q4_0"),
        (("q4_0", "--case", "2x20,1x4k"), "--case names 2: 2x20, 1x4k"),
        (("q4_0", "--shape", "4/2x64,2/2x64"), "--shape names 2: 4/2x64, 2/2x64"),
        (("q4_0", "--page-tokens", "16,64"), "--page-tokens names 2: 16, 64"),
    ],
)
def test_several_are_refused_where_one_call_has_one(command, monkeypatch, capsys, arguments, said):
    monkeypatch.setattr(profiled, "decode_once", lambda *_: pytest.fail("it began to decode"))
    format_, *options = arguments
    assert command(format_, *TINY, *options) == 2
    assert capsys.readouterr() == ("", f"error: one call is profiled, and {said}; give one\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("",), "codecs '' names none; there are fp32"),
        (("q4_0", "--case", ""), "cases '' names none"),
        (("q4_0", "--case", "8"), "case '8' must be BATCHxCONTEXT"),
        (("q4_0", "--shape", ""), "shape '' names none"),
        (("q4_0", "--page-tokens", "many"), "--page-tokens 'many' must be positive integers"),
    ],
)
def test_what_names_nothing_is_refused_and_not_the_usual(command, capsys, arguments, said):
    format_, *options = arguments
    assert command(format_, *TINY, *options) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.startswith(f"error: {said}") and not out


def test_a_cache_that_the_gpu_has_no_room_for_is_refused(monkeypatch):
    chosen = plan(device="cpu", shape="4/2x64", codecs="q4_0", cases="2x20")
    monkeypatch.setattr(profiled, "empty_pool", lambda *_: pytest.fail("it made a pool"))
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr(cuda, "memory_allocated", lambda: 0)
    monkeypatch.setattr(cuda, "mem_get_info", lambda: (1000, 1000))
    big = Case(1 << 20, 1 << 17)
    with pytest.raises(AttentionError, match=r"^the device has no room for 18432\.0 GiB$"):
        profiled.decode_once(replace(chosen, device="cuda"), big, [*chosen.spots][-1])
