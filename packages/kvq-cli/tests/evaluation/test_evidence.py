"""Evaluations that are kept, and what follows from them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from evaluating import Words, evaluate, letters, outlying
from tiny_models import llama

from kvq_cli import compose
from kvq_cli.compose import ServeOptions, build_engine
from kvq_cli.config import geometry
from kvq_cli.evaluation import evidence, probe, session
from kvq_cli.evaluation.evidence import Evidence, Measured
from kvq_cli.evaluation.session import EvalOptions, Session
from kvq_cli.models.identity import identity
from kvq_cli.models.loader import LoadedModel


def rows(**kl_and_bytes):
    """Evidence of formats, by their mean KL and their bytes a token."""
    found = [Measured(name, size, kl, 1 - kl / 2) for name, (kl, size) in kl_and_bytes.items()]
    return Evidence("a text", (Measured("fp32", 400, 0.0, 1.0), *found))


def record(tokens, *formats, text="novel"):
    """As much of a record as evidence reads."""
    row = {"bytes_per_token": 100, "kl_mean": 0.1, "top1_agreement": 0.9}
    return {
        "kind": "kvq eval",
        "text": {"name": text, "tokens": tokens},
        "rows": [{"format": name, **row} for name in formats],
    }


@pytest.fixture
def saved(tmp_path):
    """A model's directory."""
    path = tmp_path / "model"
    llama().save_pretrained(path)
    return path


def test_a_model_is_known_by_its_weights_and_config_wherever_it_lies(saved, tmp_path):
    known = identity(saved)
    copy = shutil.copytree(saved, tmp_path / "elsewhere")
    assert known == identity(copy) == identity(copy / "config.json") != None  # noqa: E711
    tuned = llama()
    with torch.no_grad():
        for weights in tuned.model.layers[1].parameters():
            weights.mul_(1.001)
    tuned.save_pretrained(copy)
    assert identity(copy) != known
    (saved / "config.json").write_text((saved / "config.json").read_text() + " ")
    assert identity(saved) != known


def test_a_place_without_weights_has_no_identity(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for place in (tmp_path, tmp_path / "config.json", tmp_path / "absent.gguf", Path("nowhere")):
        assert identity(place) is None
        assert evidence.known(place) is None
        assert evidence.keep(place, record(10, "q8_0")) is None


def test_the_ladder_holds_what_no_other_format_is_better_than():
    known = rows(
        q8_0=(0.001, 110), fp8=(0.006, 110), q6_0=(0.009, 90), q4_0=(0.15, 70),
        nvfp4=(0.2, 75), bf16=(0.0001, 200), iso4=(1.7, 60),
    )  # fmt: skip
    assert [row.format for row in known.ladder] == ["q8_0", "q6_0", "q4_0"]
    assert rows().ladder == []


def test_p096_a_format_that_harms_is_named_with_one_that_is_safer():
    known = rows(**{"q8_0": (0.001, 110), "k=q8_0,v=q4_0": (0.03, 90), "q4_0": (2.0, 70)})
    (words,) = known.warnings("q4_0")
    assert words.startswith("q4_0 ruins this model: mean KL 2,")
    assert "safer: k=q8_0,v=q4_0 (mean KL 0.03, 98.5%" in words
    assert known.warnings("q8_0") == known.warnings("never measured") == ()
    # hardly better is not safer
    (alone,) = rows(q4_0=(0.18, 70), nvfp4=(0.0999, 75)).warnings("q4_0")
    assert "harms this model" in alone and "safer" not in alone


def test_one_evaluation_is_kept_of_a_model_and_grows(saved, evaluations):
    def formats():
        return [row.format for row in evidence.known(saved).rows]

    assert evidence.known(saved) is None
    assert evidence.keep(saved, record(100, "fp32", "q8_0")).parent == evaluations
    assert evidence.keep(saved, record(100, "fp32", "q4_0")) is not None
    assert formats() == ["fp32", "q4_0", "q8_0"]
    assert evidence.keep(saved, record(50, "fp32", "q6_0", text="other")) is None
    assert formats() == ["fp32", "q4_0", "q8_0"]
    assert evidence.keep(saved, record(200, "fp32", "q6_0", text="other")) is not None
    assert formats() == ["fp32", "q6_0"]
    assert evidence.known(saved).source == "200 tokens of other"


@pytest.fixture
def kept(saved):
    """Keep a record; the formats that are held then, and what was said."""

    def add(*record_of, **other):
        said = []
        path = evidence.keep(saved, record(*record_of, **other), said.append)
        (words,) = said
        assert words.startswith("not kept" if path is None else f"kept in {path}: ")
        return [row.format for row in evidence.known(saved).rows], words

    return add


def test_fewer_tokens_never_replace_more(kept):
    kept(100, "fp32", "q4_0")
    held, words = kept(99, "fp32", "q4_0", "q8_0", "bf16")
    assert held == ["fp32", "q4_0"] and "holds another of more tokens (100)" in words


def test_an_evaluation_that_was_cut_off_before_its_first_format_replaces_none(kept):
    assert kept(50, "fp32")[0] == ["fp32"]
    assert kept(100, "fp32", text="other")[0] == ["fp32"]
    assert kept(100, "fp32", "q4_0")[0] == ["fp32", "q4_0"]
    held, words = kept(2000, "fp32")
    assert held == ["fp32", "q4_0"] and "holds another of more formats" in words
    assert kept(2000, "fp32", "q8_0")[0] == ["fp32", "q8_0"]


def test_as_many_tokens_of_another_text_replace_only_with_all_formats_of_the_old(kept):
    kept(100, "fp32", "q8_0", "q4_0")
    held, words = kept(100, "fp32", "q8_0", "q6_0", text="other")
    assert held == ["fp32", "q8_0", "q4_0"]
    assert "as many tokens and more formats (q4_0)" in words
    assert kept(100, "q8_0", "q4_0", "iso4", text="other")[0] == ["q8_0", "q4_0", "iso4"]


def broken(**row):
    found = record(10, "q8_0", "q4_0")
    found["rows"][1] |= row
    return json.dumps(found)


WRONG = [
    *("", "{", "[]", "7", "null", '{"rows": []}', '{"text": 1, "rows": [1]}', "[" * 100_000),
    '{"a":' * 100_000,
    *(json.dumps(record(10) | {"rows": rows}) for rows in (None, 7, [7], [None], [{}], [[]])),
    *(broken(kl_mean=wrong) for wrong in (None, "0.1", [], True, float("nan"), float("inf"))),
    *(broken(bytes_per_token=wrong) for wrong in (None, "9", float("-inf"), 10**400)),
    *(broken(top1_agreement=wrong) for wrong in (None, {}, float("nan"))),
    *(broken(format=wrong) for wrong in (None, 7, [], "\ud800")),
    *(json.dumps(record(wrong, "q8_0")) for wrong in (None, "10", [], 1.5, True)),
    *(json.dumps(record(10, "q8_0", text=wrong)) for wrong in (None, 7, "\ud800")),
]


@pytest.mark.parametrize("content", WRONG, ids=range(len(WRONG)))
def test_what_is_no_evaluation_is_no_evidence_and_is_replaced(saved, evaluations, content):
    file, shape = evaluations / f"{identity(saved)}.json", geometry(llama().config.to_dict())
    assert evidence.notes(saved, shape) == ()
    file.write_text(content)
    assert evidence.known(saved) is None
    (note,) = evidence.notes(saved, shape)
    assert str(file) in note and "ignored" in note
    assert evidence.keep(saved, record(10, "q8_0")) is not None
    assert evidence.known(saved) is not None
    assert evidence.notes(saved, shape) == ()


def test_a_file_of_other_bytes_is_no_evidence(saved, evaluations):
    (evaluations / f"{identity(saved)}.json").write_bytes(bytes(range(256)))
    assert evidence.known(saved) is None


def test_formats_that_this_version_or_the_model_does_not_know_are_passed_over(saved, evaluations):
    shape = geometry(llama().config.to_dict())
    evidence.keep(saved, record(10, "fp32", "q5_9", "k=q8_0,v=", "0-99:q4_0", "iso4", "q8_0", ""))
    found = evidence.known(saved, shape)
    assert [row.format for row in found.rows] == ["fp32", "q8_0"]
    (note,) = evidence.notes(saved, shape)
    assert f"{identity(saved)}.json" in note and "5 formats" in note


@pytest.mark.parametrize("row", [{"kl_mean": float("nan")}, {"kl_mean": None}, {"format": 7}])
def test_figures_that_are_none_are_not_kept_and_cost_nothing_that_was(saved, row):
    evidence.keep(saved, record(10, "q4_0"))
    worse, said = record(10, "q8_0"), []
    worse["rows"][0] |= row
    assert evidence.keep(saved, worse, said.append) is None
    (words,) = said
    assert words.startswith("not kept") and "not all of its figures are finite numbers" in words
    assert [each.format for each in evidence.known(saved).rows] == ["q4_0"]


def test_a_home_that_cannot_be_written_costs_no_evaluation_and_is_named(saved, monkeypatch):
    for place in (saved / "config.json", saved / "config.json" / "evaluations"):
        monkeypatch.setattr(evidence, "directory", lambda place=place: place)
        said = []
        assert evidence.keep(saved, record(10, "q8_0"), said.append) is None
        (words,) = said
        assert words.startswith("not kept for kvq serve and kvq plan: ") and str(place) in words


def test_a_file_that_cannot_be_replaced_is_named(saved, evaluations):
    (evaluations / f"{identity(saved)}.json").mkdir()
    said = []
    assert evidence.keep(saved, record(10, "q8_0"), said.append) is None
    (words,) = said
    assert str(evaluations) in words and words.endswith("cannot be written: Is a directory")


def test_a_place_without_weights_says_why_nothing_is_kept():
    said = []
    assert evidence.keep(Path("nowhere"), record(10, "q8_0"), said.append) is None
    assert "no weights" in said[0]


def load_instead(monkeypatch, module, model):
    loaded = LoadedModel(model, Words(), geometry(model.config.to_dict()), "tiny")
    monkeypatch.setattr(module, "load", lambda *_, **__: loaded)


def test_an_evaluation_is_kept_for_the_server_even_when_it_is_interrupted(
    saved, tmp_path, monkeypatch
):
    load_instead(monkeypatch, session, llama())
    text, said = tmp_path / "text", []
    text.write_text(letters(400).content)

    def until_q4_0(name, done, total):
        if name == "q4_0":
            raise KeyboardInterrupt

    options = EvalOptions(str(saved), text, ("q8_0,q4_0",), context=160, tokens=160, device="cpu")
    with pytest.raises(KeyboardInterrupt):
        Session().run(options, said.append, until_q4_0)
    assert [row.format for row in evidence.known(saved).rows] == ["fp32", "q8_0"]
    assert "kvq serve and kvq plan go by it" in said[-1]

    def until_q8_0(name, done, total):
        if name == "q8_0":
            raise KeyboardInterrupt

    longer = EvalOptions(str(saved), text, ("q8_0",), context=160, tokens=320, device="cpu")
    with pytest.raises(KeyboardInterrupt):
        Session().run(longer, said.append, until_q8_0)
    assert [row.format for row in evidence.known(saved).rows] == ["fp32", "q8_0"]
    assert "not kept for kvq serve and kvq plan" in said[-1] and "more formats" in said[-1]


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """What a server says of quality when it starts with a model, and what was computed for it."""

    def start(model, cache_dtype, report=lambda _: None, **options):
        path = tmp_path / "served"
        model.save_pretrained(path)
        load_instead(monkeypatch, compose, model)
        common = {"device": "cpu", "num_tokens": 512, "dtype": "float32"}
        wanted = ServeOptions(str(path), kv_cache_dtype=cache_dtype, **{**common, **options})
        return build_engine(wanted, report).summary

    return start


def harm(summary):
    return [note for note in summary.notes if "ruins" in note or "harms" in note]


def test_p061_p096_a_server_warns_of_keys_that_its_format_breaks_and_names_a_safer_one(serve):
    (words,) = harm(serve(outlying(), "q4_0"))
    assert "times the median one), and q4_0 " in words
    assert "Safer: k=q8_0,v=q4_0, 0." in words
    assert harm(serve(outlying(), "k=q8_0,v=q4_0")) == []
    assert harm(serve(llama(), "q4_0")) == []


def test_p061_rotations_of_four_values_do_not_hide_a_spike(serve):
    (words,) = harm(serve(outlying(head_dim=128), "iso4"))
    assert "and iso4 harms it" in words and "Safer: k=q8_0,v=" in words


def test_formats_that_bear_outliers_start_without_a_look_at_keys(serve, monkeypatch):
    monkeypatch.setattr(probe, "FormatCache", lambda *_, **__: pytest.fail("looked"))
    for name in ("bf16", "q8_0", "fp8", "k=q8_0,v=q4_0", "0:q8_0,1:k=bf16,v=q4_0"):
        assert harm(serve(outlying(), name)) == []


def test_where_a_format_was_measured_the_server_says_so_and_looks_no_further(
    serve, tmp_path, monkeypatch
):
    monkeypatch.setattr(probe, "FormatCache", lambda *_, **__: pytest.fail("looked"))
    found = evaluate(outlying(), "q4_0,k=q8_0,v=q4_0")
    outlying().save_pretrained(tmp_path / "served")
    evidence.keep(tmp_path / "served", found)
    (words,) = harm(serve(outlying(), "q4_0"))
    assert "this model: mean KL" in words and "safer: k=q8_0,v=q4_0" in words
    assert "320 tokens of letters" in words


def test_a_server_starts_beside_a_kept_file_that_is_no_evaluation_and_names_it(
    serve, tmp_path, evaluations
):
    llama().save_pretrained(tmp_path / "served")
    file = evaluations / f"{identity(tmp_path / 'served')}.json"
    file.write_text(broken(kl_mean=None))
    said = []
    serve(llama(), "auto", report=said.append)
    assert any(str(file) in words and "ignored" in words for words in said)


def test_a_short_start_on_a_cpu_whatever_the_model():
    model = llama()
    loaded = LoadedModel(model, Words(), geometry(model.config.to_dict()), "tiny")
    assert len(probe._tokens(loaded)) == probe.TOKENS
    loaded.model.parameters = lambda: [torch.empty(0), torch.empty(8 * 10**9, device="meta")]
    assert len(probe._tokens(loaded)) == 25


def test_the_record_that_is_kept_is_the_one_that_was_written(saved, tmp_path, monkeypatch):
    load_instead(monkeypatch, session, llama())
    text, path = tmp_path / "text", tmp_path / "record.json"
    text.write_text(letters(400).content)
    options = EvalOptions(
        str(saved), text, ("q8_0",), context=160, tokens=160, device="cpu", record=path
    )
    Session().run(options)
    kept = evidence.directory() / f"{identity(saved)}.json"
    assert json.loads(kept.read_text()) == json.loads(path.read_text())
