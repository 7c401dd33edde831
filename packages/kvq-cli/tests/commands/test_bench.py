"""`kvq bench attention` as its users run it, on a machine without a GPU."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kvq_attention import bench as attention_bench
from kvq_attention import support
from kvq_attention.errors import AttentionError
from kvq_cli.main import app

TINY = ("--device", "cpu", "--quick", "--cases", "1x20", "--repeat", "1")


def bench(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "attention", *arguments], env={"COLUMNS": "100"})


def test_it_prints_a_table_for_each_size_and_records_the_run(tmp_path):
    record, plot = tmp_path / "record.json", tmp_path / "plot.svg"
    done = bench(*TINY, "--json", str(record), "--plot", str(plot))
    assert done.exit_code == 0, done.output
    for title in ("decode 1x20, page 16, 4/2x128, reference", "store of 16 tokens", "copy_pages"):
        assert title in done.stdout
    found = json.loads(record.read_text())
    assert [row["codec"] for row in found["decode"]] == ["bf16", "q8_0", "q4_0"]
    assert found["command"].startswith("kvq bench attention --device cpu")
    assert ET.fromstring(plot.read_text()).tag.endswith("svg")
    assert "q8_0" in plot.read_text()


def test_it_measures_what_it_is_told(tmp_path):
    record = tmp_path / "record.json"
    done = bench(
        *("--device", "cpu", "--codecs", "k=q8_0,v=q4_0", "--cases", "2x9,1x33"),
        *("--pages", "16,32"),
        *("--shape", "6/2x64", "--store-tokens", "3", "--copy-tokens", "20", "--repeat", "1"),
        *("--attention-backend", "reference", "--json", str(record)),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads(record.read_text())
    points = [(row["case"], row["page_tokens"], row["codec"]) for row in found["decode"]]
    assert points == [
        (case, page, codec)
        for case in ("2x9", "1x33")
        for page in (16, 32)
        for codec in ("bf16", "k=q8_0,v=q4_0")
    ]
    assert [row["tokens"] for row in found["store"]] == [3, 3]
    assert [row["pages"] for row in found["copy"]] == [2, 2]


def test_several_layers_and_backends_are_measured_beside_each_other(tmp_path):
    record = tmp_path / "record.json"
    done = bench(
        *("--device", "cpu", "--codecs", "q4_0", "--cases", "1x9", "--repeat", "1"),
        *("--shape", "4/2x64,2/2x64", "--store-tokens", "3", "--copy-tokens", "16"),
        *("--attention-backend", "auto", "--attention-backend", "decode=reference"),
        *("--json", str(record)),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads(record.read_text())
    points = [(row["shape"], row["codec"], row["backend"]) for row in found["decode"]]
    assert points == [
        (shape, codec, "reference")  # which auto takes on a CPU: one measurement
        for shape in ("4/2x64", "2/2x64")
        for codec in ("bf16", "q4_0")
    ]
    assert "--attention-backend auto --attention-backend decode=reference" in found["command"]
    assert "decode 1x9, page 16, 2/2x64, reference" in done.stdout


def test_the_short_name_of_the_backends_option_adds_to_the_same(monkeypatch):
    def plan(**given):
        seen.append(given["backend"])
        raise AttentionError("seen")

    seen = []
    monkeypatch.setattr(attention_bench, "plan", plan)
    bench("--backend", "triton", "--attention-backend", "decode=cuda", "--backend", "auto")
    assert seen == [["triton", "decode=cuda", "auto"]]


def test_without_a_gpu_it_says_what_is_needed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = bench("--quick")
    assert done.exit_code == 2
    assert "a GPU that torch can use" in done.stderr and "--device cpu" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--cases", "many"), "8x32k"),
        (("--codecs", "q5_0"), "known codecs"),
        (("--pages", "0"), "0"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_measured(arguments, said):
    done = bench("--device", "cpu", *arguments)
    assert done.exit_code == 2
    assert said in done.stderr
    assert "decode" not in done.stdout


def test_a_wrong_output_ends_it_with_its_name(monkeypatch):
    real = attention_bench.run

    def run(*args, **kwargs):
        record = real(*args, **kwargs)
        record["decode"][1]["error"] = 0.5
        return record

    monkeypatch.setattr(attention_bench, "run", run)
    done = bench(*TINY)
    assert done.exit_code == 4
    assert "1x20, page 16, 4/2x128, q8_0 on reference: the error 5.0e-01" in done.stderr


def test_what_the_budget_leaves_out_is_named():
    done = bench(*TINY, "--budget-seconds", "1e-9")
    assert done.exit_code == 0
    assert "not measured: decode 1x20, page 16, bf16" in done.stdout


def test_a_budget_that_is_over_at_once_is_said_and_leaves_no_empty_chart(tmp_path):
    plot = tmp_path / "plot.svg"
    done = bench(*TINY, "--budget-seconds", "1e-9", "--plot", str(plot))
    assert done.exit_code == 0
    assert "nothing was measured: --budget-seconds was over" in done.stdout
    assert "no plot was written" in done.stdout
    assert not plot.exists()


@pytest.fixture
def unmeasured(monkeypatch):
    """Fail where anything would be measured."""

    def run(*_):
        pytest.fail("it began to measure")

    monkeypatch.setattr(attention_bench, "run", run)


@pytest.mark.parametrize("option", ["--json", "--plot"])
@pytest.mark.parametrize(
    ("name", "reason"),
    [("no/such/folder.svg", "No such file or directory"), ("folder.svg", "Is a directory")],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path, unmeasured, option, name, reason
):
    (tmp_path / "folder.svg").mkdir()
    path = tmp_path / name
    done = bench(*TINY, option, str(path))
    assert done.exit_code == 2
    assert done.stderr == f"error: {option} cannot be written to {str(path)!r}: {reason}\n"


def test_a_plot_that_is_no_svg_is_refused_before_anything_is_measured(tmp_path, unmeasured):
    for name in ("x.png", ""):
        done = bench(*TINY, "--plot", name and str(tmp_path / name))
        assert done.exit_code == 2
        assert "--plot draws an SVG: the file's name must end in .svg, got" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_empty_name_of_the_record_is_refused(unmeasured):
    done = bench(*TINY, "--json", "")
    assert done.exit_code == 2
    assert "--json cannot be written to '.': the name is empty or a directory" in done.stderr


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("extend=cuda", "'extend' is no operation here; there are store, decode and copy_pages"),
        ("extend=reference", "'extend' is no operation here; there are store, decode and copy_pag"),
        ("copy_pages=cuda", "copy_pages: cuda lacks copy_pages; backends that can: "),
        ("decode=cuda,decode=reference", "decode is named twice; give it one backend"),
    ],
)
def test_an_operation_that_is_not_measured_is_refused_by_its_name(unmeasured, backend, said):
    done = bench(*TINY, "--attention-backend", backend)
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert said in line


def test_a_backend_that_cannot_run_is_refused_once_before_anything_is_measured(
    monkeypatch, unmeasured
):
    reasons = {"cuda": "no GPU", "triton": "its interpreter is off", "reference": None}
    monkeypatch.setattr(support, "unavailable", lambda backend, _: reasons[backend])
    done = bench(*TINY, "--attention-backend", "triton")
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: triton cannot run on cpu: its interpreter is off; backends")


def test_tables_are_printed_even_when_the_plot_can_no_longer_be_written(tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    real = attention_bench.run

    def run(*args):
        folder.rmdir()
        return real(*args)

    monkeypatch.setattr(attention_bench, "run", run)
    done = bench(*TINY, "--plot", str(folder / "plot.svg"))
    assert done.exit_code == 2
    assert "the plot cannot be written" in done.stderr
    assert "decode 1x20, page 16, 4/2x128, reference" in done.stdout
