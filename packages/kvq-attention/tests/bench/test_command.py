"""`python -m kvq_attention.bench` as its users run it, on a machine without a GPU."""

import json
import re
import sys

import pytest

from kvq_attention.bench import __main__ as command
from kvq_attention.bench import session
from kvq_attention.errors import AttentionError

TINY = ("--device", "cpu", "--quick", "--cases", "1x20", "--repeat", "1")


@pytest.fixture
def bench(monkeypatch):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["bench", *arguments])
        return command.main()

    return run


def test_it_prints_tables_and_records_the_run(bench, tmp_path, capsys):
    record = tmp_path / "record.json"
    assert bench(*TINY, "--json", str(record)) == 0
    assert "decode 1x20, page 16, 4/2x128, reference" in capsys.readouterr().out
    assert json.loads(record.read_text())["decode"]


def test_a_record_that_cannot_be_written_is_refused_before_anything_is_measured(
    bench, tmp_path, capsys
):
    path = tmp_path / "no" / "record.json"
    assert bench(*TINY, "--json", str(path)) == 2
    said = capsys.readouterr()
    reason = "No such file or directory"
    assert said.err == f"error: --json cannot be written to {str(path)!r}: {reason}\n"
    assert said.out == ""


def test_a_record_that_can_no_longer_be_written_is_no_traceback(
    bench, tmp_path, capsys, monkeypatch
):
    folder = tmp_path / "folder"
    folder.mkdir()
    real = session.decode_row

    def row(*args):
        folder.rmdir()
        return real(*args)

    monkeypatch.setattr(session, "decode_row", row)
    assert bench(*TINY, "--json", str(folder / "record.json")) == 2
    assert "error: --json cannot be written" in capsys.readouterr().err


def test_the_short_name_of_the_backends_option_adds_to_the_same(bench, monkeypatch):
    def plan(**given):
        seen.append(given["backend"])
        raise AttentionError("seen")

    seen = []
    monkeypatch.setattr(command, "plan", plan)
    assert bench("--backend", "triton", "--attention-backend", "decode=cuda") == 2
    assert bench() == 2
    assert seen == [["triton", "decode=cuda"], "auto"]


def test_a_budget_that_is_over_at_once_is_said(bench, capsys):
    assert bench(*TINY, "--budget-seconds", "1e-9") == 0
    said = capsys.readouterr().out
    assert "not measured: decode 1x20, page 16, bf16" in said
    assert said.endswith(
        "nothing was measured: --budget-seconds was over before the first measurement\n"
    )


def test_help_explains_every_option(bench, capsys):
    with pytest.raises(SystemExit):
        bench("--help")
    words = capsys.readouterr().out.partition("options:")[2]
    explained = re.split(r"^  (?:-h, )?--", words, flags=re.MULTILINE)[1:]
    assert len(explained) == 15
    for option in explained:
        assert len(re.split(r" {2,}|\n", option.strip(), maxsplit=1)) == 2, option
