"""Evaluations of one model that are kept at the same time."""

import json
import subprocess
import sys

import pytest
from tiny_models import llama

from kvq_cli.evaluation import evidence
from kvq_cli.evaluation.claim import claimed, in_turn
from kvq_cli.evaluation.evidence import Evidence
from kvq_cli.models.identity import identity

TIMES = 60
ABOUT = {"kind": "kvq eval", "text": {"name": "novel", "tokens": 10}}
ROW = {"bytes_per_token": 100, "kl_mean": 0.1, "top1_agreement": 0.9}
KEEPS = f"""
import pathlib, sys
from kvq_cli.evaluation import evidence

model, place, name = sys.argv[1:]
evidence.directory = lambda: pathlib.Path(place)
print("ready", flush=True)
sys.stdin.readline()
for n in range({TIMES}):
    record = {{**{ABOUT}, "rows": [{{"format": f"{{name}}{{n}}", **{ROW}}}]}}
    assert evidence.keep(pathlib.Path(model), record, print) is not None
"""


@pytest.fixture
def saved(tmp_path):
    """A model's directory."""
    path = tmp_path / "model"
    llama().save_pretrained(path)
    return path


@pytest.fixture
def kept(saved, evaluations):
    """The file where the model's evaluation is kept."""
    return evaluations / f"{identity(saved)}.json"


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, "-c", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.timeout(120)
def test_of_two_evaluations_that_end_together_neither_loses_the_others_formats(saved, kept):
    processes = [start(KEEPS, saved, kept.parent, name) for name in "ab"]
    for each in processes:
        assert each.stdout.readline() == "ready\n"
    for each in processes:
        each.stdin.write("go\n")
        each.stdin.flush()
    for each in processes:
        said, _ = each.communicate()
        assert each.returncode == 0, said
    held = [row["format"] for row in json.loads(kept.read_text())["rows"]]
    assert sorted(held) == sorted(f"{name}{n}" for name in "ab" for n in range(TIMES))
    assert [each.name for each in kept.parent.iterdir()] == [kept.name]


HOLDS = """
import pathlib, sys
from kvq_cli.evaluation.claim import in_turn

with in_turn(pathlib.Path(sys.argv[1])):
    print("has it", flush=True)
    sys.stdin.read()
"""


@pytest.mark.timeout(60)
def test_a_turn_that_a_killed_process_had_is_taken_over(saved, kept):
    with start(HOLDS, kept) as other:
        assert other.stdout.readline() == "has it\n"
        other.kill()
    assert [each.name for each in kept.parent.iterdir()] == [f"{kept.name}.kvq-turn"]
    evidence.keep(saved, {**ABOUT, "rows": [{"format": "q8_0", **ROW}]})
    assert [each.name for each in kept.parent.iterdir()] == [kept.name]


@pytest.mark.timeout(60)
def test_a_record_that_is_claimed_can_be_where_it_is_kept(saved, kept):
    """`--json` may name the kept file: nobody waits for a lock of one's own."""
    with claimed(kept):
        assert evidence.keep(saved, {**ABOUT, "rows": [{"format": "q8_0", **ROW}]}) == kept


def test_a_turn_ends_when_what_it_was_for_fails(kept):
    with pytest.raises(ZeroDivisionError), in_turn(kept):
        raise ZeroDivisionError
    with in_turn(kept):
        assert [each.name for each in kept.parent.iterdir()] == [f"{kept.name}.kvq-turn"]


def test_what_is_kept_is_read_where_the_system_has_no_such_locks(saved, kept):
    kept.write_text(json.dumps({**ABOUT, "rows": [{"format": "q8_0", **ROW}]}))
    reads = (
        "import pathlib, sys; sys.modules['fcntl'] = None\n"
        "from kvq_cli.evaluation import evidence\n"
        "evidence.directory = lambda: pathlib.Path(sys.argv[2])\n"
        "print(evidence.known(pathlib.Path(sys.argv[1])))"
    )
    with start(reads, saved, kept.parent) as other:
        assert other.stdout.read() == f"{Evidence.of(json.loads(kept.read_text()))}\n"
