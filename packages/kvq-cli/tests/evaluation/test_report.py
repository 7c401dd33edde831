"""What is said of a record, and figures that are none."""

import json

import pytest
import torch
from evaluating import evaluate, outlying
from tiny_models import llama

from kvq_cli.evaluation import caches, evaluator, material, probe, report
from kvq_cli.evaluation.evaluator import Evaluator
from kvq_cli.evaluation.metrics import NotFiniteError
from kvq_cli.evaluation.picture import scatter
from kvq_cli.evaluation.record import as_json
from kvq_cli.evaluation.session import Session


def of_ratios(*ratios):
    layers = [{"layer": i, "k_outlier_ratio": ratio} for i, ratio in enumerate(ratios)]
    return {"rows": [{"format": "fp32", "layers": layers, "needles": [], "calls": []}]}


def test_keys_are_spoken_of_from_where_they_break_a_format():
    least = min(probe.BREAKS_AT.values())
    assert report.notes(of_ratios(1.52, least - 0.01)) == []
    (note,) = report.notes(of_ratios(1.52, least, 2.0))
    assert note.startswith(f"keys: the largest channel of layer 1 is {least:.3g} times the median")


def test_layers_that_have_no_ratio_are_named_and_hide_no_other():
    first, second = report.notes(of_ratios(None, 9.0, None))
    assert first.startswith("keys: the largest channel of layer 1 is 9 times")
    assert second.startswith("keys: in layer 0, 2 half the channels of a head or more are 0")
    assert report.notes({"rows": []}) == []


def test_keys_that_stand_out_are_spoken_of_in_a_model_that_has_them():
    (note, *_) = report.notes(evaluate(outlying(), "q8_0"))
    assert note.startswith("keys: the largest channel of layer")


@pytest.mark.parametrize(
    ("kl", "text"),
    [
        (0.0, "0"),
        (0.099982, "0.09998"),  # 0.1 is a limit of what is warned of
        (0.0999996, "0.0999996"),
        (0.1, "0.1"),
        (0.100049, "0.1"),
        (0.00999612, "0.009996"),
        (0.499999, "0.499999"),
        (0.123456, "0.123"),
        (1.23e-5, "1.23e-05"),
        (12.3456, "12.3"),
    ],
)
def test_a_figure_is_not_shown_on_the_other_side_of_a_limit(kl, text):
    assert report.nats(kl) == text


@pytest.mark.parametrize("share", [1.0, 0.6])
def test_keys_of_which_most_are_zero_have_no_ratio_and_a_record_that_is_json(share):
    """0/0 where all are, x/0 where more than half of a head's channels are."""
    model = llama()
    with torch.no_grad():
        weight = model.model.layers[1].self_attn.k_proj.weight  # [heads * 32, hidden]
        half = torch.arange(len(weight)) % 16 < share * 16  # rotations turn i and i + 16 together
        weight[half] = 0.0
    record = evaluate(model, "q8_0,q4_0")
    for row in record["rows"]:
        assert row["layers"][1]["k_outlier_ratio"] is None
        assert row["layers"][0]["k_outlier_ratio"] > 1
    assert json.loads(as_json(record)) == record
    (note,) = [note for note in report.notes(record) if "half the channels" in note]
    assert note.startswith("keys: in layer 1 half")
    assert all("nan" not in cell for table in report.tables(record) for row in table.rows
               for cell in row)  # fmt: skip
    assert "nan" not in scatter(record)


def test_a_model_whose_own_logits_are_not_finite_is_told_apart_from_a_format(tmp_path):
    model, session = llama(), Session()
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    with pytest.raises(NotFiniteError, match=r"model itself, over a cache in fp32.*float32 is too"):
        evaluate(model, "q8_0", session=session, record=tmp_path / "record.json")
    assert session.record["rows"] == []


def test_a_format_that_breaks_the_logits_is_named_and_what_was_before_is_kept(
    tmp_path, monkeypatch
):
    make = Evaluator._cache

    def breaking(self, name):
        cache = make(self, name)
        if name == "q8_0":
            cache.runner.forward = lambda *args, **kwargs: torch.full((48, 96), float("nan"))
        return cache

    monkeypatch.setattr(Evaluator, "_cache", breaking)
    path = tmp_path / "record.json"
    with pytest.raises(NotFiniteError, match=r"cache in q8_0 .*logits are not finite.*fp32 they"):
        evaluate(llama(), "bf16,q8_0,q4_0", record=path)
    held = json.loads(path.read_text())
    assert [row["format"] for row in held["rows"]] == ["fp32", "bf16"]
    again = evaluate(llama(), "q4_0", record=path)  # goes on without it
    assert [row["format"] for row in again["rows"]] == ["fp32", "q4_0", "bf16"]


@pytest.mark.parametrize("place", ["windows", "needles", "prompts"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_are_looked_at_wherever_they_are_read(monkeypatch, place, value):
    """Not only those of the text: a needle or a continuation may be where a cache overflows."""
    cut, tail, forced = material.Material.cut, caches.FormatCache.tail, caches.FormatCache.forced
    seen = []

    def cutting(*args, **kwargs):
        seen.append(cut(*args, **kwargs))
        return seen[-1]

    def broken(logits):
        logits = logits.clone()
        logits[-1, 5] = value
        return logits

    def breaks(tokens):
        made = seen[0]
        if place == "windows":
            return list(tokens) in made.windows
        if place == "needles":
            return list(tokens) in [needle.tokens for needle in made.needles]
        return list(tokens) not in [*made.windows, *(needle.tokens for needle in made.needles)]

    monkeypatch.setattr(evaluator.Material, "cut", cutting)
    if place == "windows":

        def forcing(self, tokens, wanted=0):
            for chunk in forced(self, tokens, wanted):
                if breaks(tokens) and wanted == 0:
                    object.__setattr__(chunk, "logits", broken(chunk.logits))
                yield chunk

        monkeypatch.setattr(caches.FormatCache, "forced", forcing)
    else:
        monkeypatch.setattr(
            caches.FormatCache,
            "tail",
            lambda self, tokens, count: (
                broken(tail(self, tokens, count)) if breaks(tokens) else tail(self, tokens, count)
            ),
        )
    with pytest.raises(NotFiniteError, match="logits of the model itself"):
        evaluate(llama(), "q8_0")
