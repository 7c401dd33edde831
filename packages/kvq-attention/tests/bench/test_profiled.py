import sys

import pytest
import torch

from kvq_attention import launches
from kvq_attention.bench import plan, profiled

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
    assert command("q4_0", *TINY, "--backend", "cuda") == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("error: unknown codec")
    assert said[1].startswith("error: decode: cuda cannot run on cpu")
