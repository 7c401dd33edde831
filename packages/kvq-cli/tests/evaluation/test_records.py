"""Records that were edited, cut short or come from elsewhere; who may write them."""

import json
import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from evaluating import evaluate
from tiny_models import llama

from kvq_cli.evaluation.claim import claimed
from kvq_cli.evaluation.fingerprint import fingerprint
from kvq_cli.evaluation.record import RecordError, as_json, check_place, finished
from kvq_cli.evaluation.schema import fault

RECORDS = Path(__file__).parents[4] / "docs" / "benchmarks"
IN_REPOSITORY = pytest.mark.skipif(
    not RECORDS.is_dir(), reason="records are in the repository, not in an sdist"
)


@pytest.fixture(scope="module")
def whole():
    return evaluate(llama(), "q8_0")


def replaced(record, path, value):
    """A record in which one thing, by the keys and numbers that lead to it, is another."""
    record = deepcopy(record)
    *before, last = path
    inner = record
    for step in before:
        inner = inner[step]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return record


def refused(record, tmp_path, message, text=None):
    """It is refused by name before anything is computed, and left as it was."""
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record) if text is None else text)
    before, model = path.read_text(), llama()
    model.forward = None  # whoever calls it fails
    with pytest.raises(RecordError, match=rf"record\.json.*{message}"):
        evaluate(model, "q8_0,q4_0", record=path)
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["rows"], None, "rows is null, not a list"),
        (["rows"], {}, "rows is an object, not a list"),
        (["rows", 1], None, r"rows\[1\] is null, not an object"),
        (["rows", 0], {}, r"rows\[0\] has no format"),
        (["rows", 0], {"format": "fp32"}, r"rows\[0\] has no bytes_per_token"),
        (["rows", 1, "kl_mean"], ..., r"rows\[1\] has no kl_mean"),
        (["rows", 1, "kl_mean"], "0.1", r'rows\[1\].kl_mean is "0.1", not a number'),
        (["rows", 1, "kl_mean"], None, r"kl_mean is null, not a number"),
        (["rows", 1, "kl_mean"], True, r"kl_mean is true, not a number"),
        (["rows", 1, "kl_99"], float("nan"), r"kl_99 is NaN, not a number"),
        (["rows", 1, "kl_99"], float("inf"), r"kl_99 is Infinity, not a number"),
        (["rows", 1, "kl_99"], 10**400, r"kl_99 is 1000.*, not a number"),
        (["rows", 0, "format"], None, "format is null, not a name"),
        (["rows", 0, "format"], ["fp32"], "format is a list, not a name"),
        (["rows", 0, "format"], "fp\udc80", "format is .*, not a name"),
        (["rows", 1, "format"], "fp32", "rows has fp32 twice"),
        (["rows", 0, "bytes_per_token"], 0, "bytes_per_token is 0, not a number above 0"),
        (["rows", 0, "greedy_tokens"], [], "greedy_tokens is empty"),
        (["rows", 0, "greedy_tokens"], [64, 1.5], r"greedy_tokens\[1\] is 1.5, not a whole"),
        (["rows", 0, "needles", 2, "found"], 1, r"needles\[2\].found is 1, not true or false"),
        (["rows", 0, "layers"], [], "layers is empty"),
        (["rows", 0, "layers", 1, "k"], 7, r"layers\[1\].k is 7, not an object"),
        (["rows", 0, "layers", 1, "v", "codec"], ..., r"layers\[1\].v has no codec"),
        (["rows", 0, "more"], 1, r'rows\[0\] has "more", which no version'),
        (["text"], "letters", 'its text is "letters", not an object'),
        (["text", "tokens"], ..., "its text.tokens is null, not 320"),
        (["model", "name"], "x" * 500, 'its model.name is "x+….*, not "tiny"'),
    ],
)
def test_a_record_that_is_not_quite_one_is_refused_by_what_is_wrong(
    whole, tmp_path, path, value, message
):
    refused(replaced(whole, path, value), tmp_path, message)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"kind":' * 100_000, "1" * 5000, "\0", "\ufeff{}"]
)
def test_what_no_reader_gets_through_is_refused_by_name(whole, tmp_path, text):
    refused(whole, tmp_path, "holds no evaluation", text)


def test_rows_that_lie_too_deep_are_refused_by_name(whole, tmp_path):
    text = json.dumps(whole)
    deep = text.replace('"found": true', '"found": ' + "[" * 300 + "]" * 300, 1)
    deep = deep if deep != text else text.replace('"found": false', '"found": [[[]]]', 1)
    refused(whole, tmp_path, "found is a list, not true or false", deep)


def test_every_single_thing_that_is_left_out_of_a_row_is_missed(whole):
    def places(value, path=()):
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in inner:
            if isinstance(value, dict):
                yield (*path, key)
            if isinstance(each, dict | list):
                yield from places(each, (*path, key))

    rows = whole["rows"]
    assert fault(rows) is None
    assert len(list(places(rows))) > 100
    for place in places(rows):
        assert fault(replaced(rows, place, ...)) is not None, place


def test_an_empty_file_is_a_new_one(whole, tmp_path):
    """Programs that reserve a name leave one."""
    path = tmp_path / "record.json"
    path.touch()
    assert finished(path, {}) == {}
    assert evaluate(llama(), "q8_0", record=path) == whole
    assert path.read_text() == as_json(whole)


def test_only_an_ordinary_file_is_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (tmp_path, pipe, Path("/dev/null")):
        with pytest.raises(RecordError, match="no ordinary file"):
            check_place(path)
        with pytest.raises(RecordError, match="no ordinary file"):
            finished(path, {})


def test_a_record_is_json_that_any_program_reads():
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="JSON"):
            as_json({"rows": [value]})


def test_a_claim_is_refused_at_once_while_another_process_has_it(tmp_path):
    path = tmp_path / "record.json"
    holds = (
        "import sys, pathlib; from kvq_cli.evaluation.claim import claimed\n"
        "with claimed(pathlib.Path(sys.argv[1])): print('has it', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holds, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"has it\n"
        with pytest.raises(RecordError, match=rf"writes .*record\.json.*\(process {other.pid}\)"):
            claimed(path).__enter__()
        with claimed(tmp_path / "other.json"):
            pass
        other.kill()
    assert [each.name for each in tmp_path.iterdir()] == ["record.json.kvq-lock"]
    with claimed(path), pytest.raises(RecordError, match=rf"process {os.getpid()}"):
        claimed(path).__enter__()
    assert list(tmp_path.iterdir()) == []
    with claimed(path), claimed(None):
        pass


def test_a_claim_where_nothing_can_be_written_says_so(tmp_path):
    with pytest.raises(RecordError, match=r"cannot be written.*No such file"):
        claimed(tmp_path / "absent" / "record.json").__enter__()


def test_any_weight_that_changes_is_another_model():
    """Edited experts and trained embeddings change rows in the middle, not the first."""
    known = fingerprint(llama())
    assert fingerprint(llama()) == known
    for name, _ in llama().named_parameters():
        for place in (0, 1, 0.37, 0.5, 1.0):
            model = llama()
            with torch.no_grad():
                values = model.get_parameter(name).flatten()
                index = place if isinstance(place, int) else int(place * (len(values) - 1))
                values[index] += 0.001
            assert fingerprint(model) != known, (name, place)
    model = llama()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[1:] *= 3
    assert fingerprint(model) != known


def test_rows_that_change_places_are_another_model():
    """What a sum does not see."""
    known, model = fingerprint(llama()), llama()
    with torch.no_grad():
        weight = model.model.layers[0].mlp.up_proj.weight
        weight.copy_(weight.flip(0))
    assert fingerprint(model) != known


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_fingerprint_of_any_type_and_of_an_odd_number_of_values(dtype):
    class Odd(torch.nn.Module):
        def __init__(self, last):
            super().__init__()
            self.config = llama().config
            self.odd = torch.nn.Parameter(torch.tensor([1.0, 2.0, last], dtype=dtype))
            self.turned = torch.nn.Parameter(torch.arange(6.0, dtype=dtype).reshape(2, 3).T)
            self.none = torch.nn.Parameter(torch.empty(0, dtype=dtype))
            self.one = torch.nn.Parameter(torch.tensor(3.0, dtype=dtype))

    assert fingerprint(Odd(3.0)) == fingerprint(Odd(3.0)) != fingerprint(Odd(4.0))


@IN_REPOSITORY
def test_what_is_published_can_be_continued():
    paths = sorted(RECORDS.glob("eval-*.json"))
    assert len(paths) >= 2
    for path in paths:
        held = json.loads(path.read_text())
        about = {key: value for key, value in held.items() if key != "rows"}
        assert [*finished(path, about).values()] == held["rows"]
        assert as_json(held) == path.read_text()


@IN_REPOSITORY
def test_the_published_record_is_of_the_weights_that_the_demo_has(smollm2):
    held = json.loads((RECORDS / "eval-smollm2-cpu.json").read_text())
    assert fingerprint(smollm2.model) == held["model"]["fingerprint"]
