import json
import shlex
from dataclasses import replace

import pytest
from rich.console import Console
from scripted_engine import ScriptedEngine

from kvq_cli.commands.screen import Screen, curl, panel


def shown(**changes):
    summary = replace(ScriptedEngine().summary, **changes)
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(panel(summary))
    return capture.get()


def test_a_cache_larger_than_bf16s_says_so():
    assert "46,080 bytes, 200.0% of bf16's 23,040" in shown(bytes_per_token=46080.0)


def test_fractions_of_a_byte_are_not_rounded_away():
    assert "1,152.25 bytes" in shown(bytes_per_token=1152.25)


def test_names_with_brackets_are_no_markup():
    assert "model [/red] x" in shown(model_name="model [/red] x")


@pytest.mark.parametrize("name", ["plain", "it's", 'double "quoted"', "größe", "$HOME `x`"])
def test_the_command_survives_any_name(name):

    command = shlex.split(curl("http://[::1]:1919", name, chats=True))
    assert command[1] == "http://[::1]:1919/v1/chat/completions"
    assert json.loads(command[-1])["model"] == name


def test_p100_the_start_says_what_a_token_costs_how_many_fit_and_what_bf16_would_have_had():
    """A kind of report: a pool that takes a share of memory is as large whatever its format."""
    text = " ".join(
        shown(bytes_per_token=6480.0, num_tokens=145_920, bf16_num_tokens=41_024).split()
    )
    assert "6,480 bytes, 28.1% of bf16's 23,040" in text
    assert "145,920 tokens in" in text and "bf16 would hold 41,024" in text


def test_a_table_that_nobody_reads_on_a_terminal_is_whole(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    columns = [f"a long column {n}" for n in range(9)]
    Screen().table("title", columns, [[f"cell number {n}" for n in range(9)]])
    shown = capsys.readouterr().out
    assert all(word in shown for n in range(9) for word in (columns[n], f"cell number {n}"))
