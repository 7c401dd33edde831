"""`kvq eval` as its users run it."""

from __future__ import annotations

import json
import os
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from evaluating import letters
from safetensors.torch import load_file, save_file
from tiny_models import llama
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from kvq_cli.evaluation import needles
from kvq_cli.evaluation.claim import claimed
from kvq_cli.evaluation.session import Session
from kvq_cli.main import app
from kvq_cli.models import loader


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model on disk whose tokens are characters."""
    directory: Path = tmp_path_factory.mktemp("tiny")
    llama().save_pretrained(directory)
    vocabulary = {chr(32 + n): n for n in range(96)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(directory)
    return str(directory)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "letters.txt"
    path.write_text(letters(400).content)
    return str(path)


def run(*arguments: str) -> Any:
    given = ["eval", *arguments, "--device", "cpu", "--threads", "1"]
    return CliRunner().invoke(app, given, env={"COLUMNS": "200"})


def test_tables_a_record_and_a_picture(model, text, tmp_path):
    record, plot = tmp_path / "record.json", tmp_path / "plot.svg"
    arguments = (model, "--text", text, "--context", "160", "--json", str(record))
    done = run(*arguments, "--kv-cache-dtype", "q4_0,k=q8_0,v=q4_0", "--plot", str(plot))
    assert done.exit_code == 0, done.output
    held = json.loads(record.read_text())
    assert [row["format"] for row in held["rows"]] == ["fp32", "q4_0", "k=q8_0,v=q4_0"]
    assert (held["text"]["name"], held["text"]["tokens"]) == ("letters.txt", 320)
    for row in held["rows"]:
        assert f"{row['perplexity']:.4f}" in done.output
        assert row["format"] in done.output
    assert "the largest channel of layer" not in done.output  # no more than in any model
    labels = [e.text for e in ET.fromstring(plot.read_text()).iter() if e.tag.endswith("text")]
    assert {"q4_0", "k=q8_0,v=q4_0"} <= set(labels) and "fp32" not in labels

    # once more with another format: what is there is kept, and the picture shows all
    again = run(*arguments, "--kv-cache-dtype", "bf16", "--plot", str(plot))
    assert again.exit_code == 0, again.output
    rows = {row["format"]: row for row in json.loads(record.read_text())["rows"]}
    assert all(rows[row["format"]] == row for row in held["rows"]) and len(rows) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-cache-dtype", "q9_0"], "'q9_0'"),
        (["--kv-cache-dtype", "iso4"], "iso4 cannot store the keys"),
        (["--kv-cache-dtype", "0:bf16"], "layer 1 has no format"),
        (["--context", "512"], "context 512 exceeds the 256 positions"),
        (["--context", "64"], "context must be at least 128, got 64"),
        (["--tokens", "4k"], "the text has 400 tokens and"),
        (["--tokens", "many"], "'many' is no number of tokens"),
        (["--text", "absent.txt"], "'absent.txt' cannot be read"),
        (["--plot", "plot.png"], "must end in .svg"),
        (["--plot", "absent/plot.svg"], "the plot cannot be written to absent/plot.svg"),
        (["--json", "absent/record.json"], "the record cannot be written to 'absent/record.json'"),
        (["--json", "/dev/null"], "'/dev/null' is no ordinary file"),
        (["--attention-backend", "cuda"], "cuda"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_one_message(
    model, text, arguments, message, monkeypatch
):
    monkeypatch.setattr(loader, "_weights", None)  # whoever reads weights fails
    done = run(model, "--text", text, *arguments)
    assert done.exit_code == 2, done.output
    assert message in done.output and "Traceback" not in done.output


def changed(model: str, place: Path, **config: Any) -> str:
    """A copy of the model with another config."""
    shutil.copytree(model, place)
    file = place / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return str(place)


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (100, "was made for 100 positions, and the shortest context that is evaluated has 128"),
        # one token a character: 82 for the statement twice, 13 for the number twice and a dot
        (128, "a context of 190 is the shortest that is evaluated: it is too short"),
    ],
)
def test_a_model_of_too_few_positions_is_told_so_and_not_the_context(
    model, text, tmp_path, monkeypatch, positions, message
):
    monkeypatch.setattr(loader, "_weights", None)
    monkeypatch.setattr(needles, "STATEMENT", " The number of the farthest lighthouse is")
    assert len(needles.STATEMENT) == 41
    short = changed(model, tmp_path / "short", max_position_embeddings=positions)
    done = run(short, "--text", text)
    assert (done.exit_code, message in done.output) == (2, True), done.output
    assert "longer --context" not in done.output


def test_a_model_without_its_tokenizer_names_the_file(model, text, tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "_weights", None)
    copy = Path(changed(model, tmp_path / "bare"))
    for file in copy.glob("tokenizer*"):
        file.unlink()
    done = run(str(copy), "--text", text)
    assert (done.exit_code, "it has no tokenizer.json; fetch" in done.output) == (2, True)
    assert "sentencepiece" not in done.output


def test_a_record_of_another_context_is_refused_before_the_model_loads(
    model, text, tmp_path, monkeypatch
):
    record = tmp_path / "record.json"
    first = ("--text", text, "--json", str(record), "--kv-cache-dtype", "bf16")
    assert run(model, *first, "--context", "160").exit_code == 0
    held = record.read_text()
    monkeypatch.setattr(loader, "_weights", None)
    for given, message in [
        (("--context", "200"), "its context is 160, not 200"),
        (("--context", "160", "--chunk-tokens", "32"), "its chunk_tokens is 256, not 32"),
        (("--context", "160", "--page-tokens", "32"), "its page_tokens is 16, not 32"),
    ]:
        done = run(model, *first, *given)
        assert (done.exit_code, message in done.output) == (2, True), done.output
    assert record.read_text() == held


def test_two_evaluations_never_write_one_record(model, text, tmp_path):
    record = tmp_path / "record.json"
    with claimed(record):
        done = run(model, "--text", text, "--json", str(record))
    assert done.exit_code == 2
    assert f"another kvq eval writes '{record}' now (process {os.getpid()})" in done.output
    assert not list(tmp_path.glob("record*"))


def test_a_plot_that_was_there_is_left_as_it_was_by_a_refusal(model, tmp_path):
    plot, absent = tmp_path / "plot.svg", tmp_path / "new.svg"
    plot.write_text("mine")
    for each in (plot, absent):
        assert run(model, "--text", str(tmp_path / "no"), "--plot", str(each)).exit_code == 2
    assert plot.read_text() == "mine" and not absent.exists()


def test_a_model_that_makes_no_predictions_is_refused_and_nothing_is_kept(
    model, text, tmp_path, evaluations
):
    copy, record = Path(changed(model, tmp_path / "nan")), tmp_path / "record.json"
    weights = load_file(copy / "model.safetensors")
    weights["model.norm.weight"][:] = float("nan")
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    done = run(str(copy), "--text", text, "--context", "160", "--json", str(record))
    assert done.exit_code == 2, done.output
    assert "logits of the model itself, over a cache in fp32, are not finite" in done.output
    assert json.loads(record.read_text())["rows"] == [] and not list(evaluations.iterdir())


def test_a_model_that_is_not_there(text):
    done = run("nowhere", "--text", text)
    assert (done.exit_code, "there is no model at 'nowhere'" in done.output) == (2, True)


def test_ctrl_c_shows_what_is_finished(model, text, monkeypatch, tmp_path):
    evaluate = Session.evaluate

    def interrupted(self: Session, *given: Any) -> None:
        *others, progress = given

        def tell(name: str, done: int, total: int) -> None:
            progress(name, done, total)
            if name == "q8_0" and done:
                raise KeyboardInterrupt

        evaluate(self, *others, tell)

    monkeypatch.setattr(Session, "evaluate", interrupted)
    record = tmp_path / "record.json"
    arguments = ("--text", text, "--context", "128", "--tokens", "128", "--json", str(record))
    done = run(model, *arguments, "--kv-cache-dtype", "bf16,q8_0")
    assert done.exit_code == 130
    assert "interrupted" in done.output and "128 tokens of letters.txt" in done.output
    rows = json.loads(record.read_text())["rows"]
    assert [row["format"] for row in rows] == ["fp32", "bf16"]
    assert all(f"{row['perplexity']:.4f}" in done.output for row in rows)
