"""Records of tiny evaluations: whole, interrupted, continued, refused."""

import json

import pytest
from evaluating import evaluate, letters, outlying
from tiny_models import llama

from kvq_cli.config import CacheFormatError, ConfigError, geometry, split_formats
from kvq_cli.evaluation.record import RecordError, as_json
from kvq_cli.evaluation.session import EvalOptions, Session, wanted_formats

FORMATS = "q8_0,k=q8_0,v=q4_0,q4_0"
MIX = "0:bf16,1:k=q8_0,v=q4_0"


@pytest.fixture(scope="module")
def whole():
    """The record of an evaluation that nothing disturbed."""
    return evaluate(llama(), FORMATS, MIX)


def names(record):
    return [row["format"] for row in record["rows"]]


def test_the_same_evaluation_gives_the_same_record(whole):
    assert as_json(evaluate(llama(), FORMATS, MIX)) == as_json(whole)


def test_the_reference_comes_first_and_differs_in_nothing(whole):
    assert names(whole) == ["fp32", "q8_0", "k=q8_0,v=q4_0", "q4_0", MIX]
    first = whole["rows"][0]
    assert [first[key] for key in ("kl_mean", "kl_999", "top1_agreement")] == [0.0, 0.0, 1.0]
    assert first["greedy_tokens"] == [64] * 4


def test_what_decoding_one_token_at_a_time_gives_is_what_chunks_predict(whole):
    """Greedy continuations were decoded; that fp32 agrees with all of them was read in chunks."""
    assert whole["rows"][0]["greedy_tokens"] == [64] * 4
    assert min(whole["rows"][3]["greedy_tokens"]) < 64


def test_each_layer_is_measured_in_its_own_format(whole):
    by_name = {row["format"]: row for row in whole["rows"]}
    mixed = by_name[MIX]["layers"]
    assert [(each["k"]["codec"], each["v"]["codec"]) for each in mixed] == [
        ("bf16", "bf16"),
        ("q8_0", "q4_0"),
    ]
    assert mixed[1]["v"] == by_name["q4_0"]["layers"][1]["v"]
    assert mixed[1]["k"] == by_name["q8_0"]["layers"][1]["k"]
    tokens = {name: row["bytes_per_token"] for name, row in by_name.items()}
    assert tokens[MIX] == tokens["fp32"] / 4 + tokens["k=q8_0,v=q4_0"] / 2


def test_an_interrupted_evaluation_goes_on_where_it_was(whole, tmp_path):
    path, told = tmp_path / "record.json", []

    def until_the_third(name, done, total):
        told.append(name)
        if name == "k=q8_0,v=q4_0" and done:
            raise KeyboardInterrupt

    session = Session()
    with pytest.raises(KeyboardInterrupt):
        evaluate(llama(), FORMATS, MIX, record=path, tell=until_the_third, session=session)
    assert names(session.record) == names(json.loads(path.read_text())) == ["fp32", "q8_0"]
    told.clear()
    evaluate(llama(), FORMATS, MIX, record=path, tell=lambda name, *_: told.append(name))
    assert "q8_0" not in told and "q4_0" in told
    assert path.read_text() == as_json(whole)
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_is_computed_when_nothing_is_left(whole, tmp_path):
    path = tmp_path / "record.json"
    path.write_text(as_json(whole))
    model = llama()
    model.forward = None  # whoever calls it fails
    assert evaluate(model, FORMATS, MIX, record=path) == whole
    assert names(evaluate(model, "q4_0", record=path))[:2] == ["fp32", "q4_0"]
    assert sorted(names(json.loads(path.read_text()))) == sorted(names(whole))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"text": letters(320, seed=9)}, 'its text.sha256 is "[0-9a-f]{64}", not "[0-9a-f]{64}"'),
        ({"tokens": 160}, "its text.tokens is 320, not 160"),
        ({"page_tokens": 32}, "its page_tokens is 16, not 32"),
        ({"seed": 1}, 'its model.fingerprint is "[0-9a-f]{16}", not "[0-9a-f]{16}"'),
    ],
)
def test_a_record_of_another_evaluation_is_kept(whole, tmp_path, changed, message):
    path = tmp_path / "record.json"
    path.write_text(as_json(whole))
    model = llama(seed=changed.pop("seed", 0))
    with pytest.raises(RecordError, match=rf"another evaluation: {message}.*another file"):
        evaluate(model, "q6_0", record=path, **changed)
    assert path.read_text() == as_json(whole)


@pytest.mark.parametrize("content", ["{", "[1]", '{"kind": "bench"}'])
def test_a_file_that_is_no_record_is_not_overwritten(tmp_path, content):
    path = tmp_path / "mine.json"
    path.write_text(content)
    with pytest.raises(RecordError, match=r"holds no evaluation; it is not overwritten"):
        evaluate(llama(), "q8_0", record=path)
    assert path.read_text() == content


def test_a_record_that_cannot_be_written_is_said_before_anything_is_computed(tmp_path):
    model = llama()
    model.forward = None
    with pytest.raises(RecordError, match="cannot be written"):
        evaluate(model, "q8_0", record=tmp_path / "absent" / "record.json")


def test_formats_are_split_where_pairs_end():
    assert split_formats("q8_0,k=q8_0,v=q4_0,iso4,k=bf16,v=q4_0,v=q6_0,k=q8_0") == [
        "q8_0", "k=q8_0,v=q4_0", "iso4", "k=bf16,v=q4_0", "v=q6_0,k=q8_0",
    ]  # fmt: skip
    assert split_formats(MIX) == [MIX]


def test_without_formats_every_codec_that_stores_the_rows_is_measured():
    shape = geometry(llama(head_dim=32).config.to_dict())
    assert [str(each) for each in wanted_formats((), shape)] == [
        "fp32", "bf16", "fp16", "q8_0", "q6_0", "q4_0", "fp8_e4m3", "fp8", "nvfp4",
        "k=q8_0,v=q4_0",
    ]  # fmt: skip
    wide = wanted_formats((), geometry(llama(head_dim=128).config.to_dict()))
    assert {"iso3", "iso4"} < {str(each) for each in wide}
    with pytest.raises(CacheFormatError, match="iso4 cannot store"):
        wanted_formats(("q8_0,iso4",), shape)
    with pytest.raises(CacheFormatError, match=r"'q9_0'.*codecs are"):
        wanted_formats(("q8_0,q9_0",), shape)


@pytest.mark.parametrize("given", [{"tokens": 0}, {"context": 127}])
def test_numbers_too_small_are_refused(given):
    [(name, value)] = given.items()
    with pytest.raises(ConfigError, match=f"{name} must be at least .*, got {value}"):
        EvalOptions("tiny", "text", **given)


def test_p136_a_rotation_of_either_side_is_measured_and_not_assumed():
    """Which side it suits depends on model and format: both are tried where nobody names one."""
    shape = geometry(llama(head_dim=128).config.to_dict())
    assert {"k=iso4,v=q8_0", "k=q8_0,v=iso4"} < {str(each) for each in wanted_formats((), shape)}
    model = outlying(head_dim=128)
    rows = {
        row["format"]: row for row in evaluate(model, "iso4,k=iso4,v=q8_0,k=q8_0,v=iso4")["rows"]
    }
    keys, values = rows["k=iso4,v=q8_0"], rows["k=q8_0,v=iso4"]
    assert keys["kl_mean"] > 3 * values["kl_mean"]
    assert keys["v_relative_error"] < 0.02 < values["v_relative_error"] < 0.3


def test_p061_keys_that_stand_out_show_before_anything_is_served():
    """A bias on one channel of the keys ruins coarse keys, not coarse values."""
    rows = {row["format"]: row for row in evaluate(outlying(), "q4_0,k=q8_0,v=q4_0")["rows"]}
    assert min(each["k_outlier_ratio"] for each in rows["fp32"]["layers"]) > 10
    assert rows["q4_0"]["kl_mean"] > 5 * rows["k=q8_0,v=q4_0"]["kl_mean"]


def test_a_record_is_json_whose_figures_share_a_line():
    record = {"name": 'a "{[\n] b', "rows": [{"greedy": [1, 2], "layers": [{"k": {"error": 0.5}}]}]}
    text = as_json(record)
    assert json.loads(text) == record
    assert '"greedy": [1, 2]' in text and '{"error": 0.5}' in text
