"""Calls of a function that a model is asked to write, and how they are graded."""

import json

import pytest
from evaluating import Words, evaluate, letters, plain_logits
from tiny_models import llama

from kvq_cli.evaluation import calls, material

ROOM = 1024  # characters: the examples and a question take some 600

RIGHT = '{"name": "add_person", "arguments": {"name": "Ingrid", "age": 38, "city": "Bergen"}}'


@pytest.fixture(scope="module")
def asked():
    return calls.asked(Words(begin=95), [95], ROOM)


def test_examples_come_first_and_none_of_them_holds_an_answer(asked):
    prompts = ["".join(map(Words().decode, [call.prompt[1:]])) for call in asked]
    assert [call.prompt[0] for call in asked] == [95] * len(asked)
    for prompt, call in zip(prompts, asked, strict=True):
        assert prompt.endswith("Call:") and prompt.count("\nCall:") == 5
        assert call.right not in prompt
        assert call.new_tokens > len(call.right)
        for value in json.loads(call.right)["arguments"].values():
            assert str(value) in prompt.splitlines()[-2]


@pytest.mark.parametrize(
    ("answer", "valid", "right"),
    [
        (f" {RIGHT}\nUser: Tomas", True, True),
        (" " + RIGHT.replace("Bergen", "Oslo"), True, False),
        (" " + RIGHT.replace("38", '"38"'), False, False),
        (" " + RIGHT.replace("city", "town"), False, False),
        (f" {RIGHT[:-1]}\n", False, False),
        (f"{RIGHT}, {RIGHT}", False, False),
        ("", False, False),
        ("7", False, False),
    ],
)
def test_p098_an_answer_counts_when_it_can_be_carried_out(asked, answer, valid, right):
    assert asked[0].right == RIGHT
    assert asked[0].grade(answer) == {"valid": valid, "right": right}


def test_a_context_without_room_for_examples_asks_for_no_calls():
    assert calls.asked(Words(), [], 500) == []


def test_p098_each_format_answers_over_its_own_cache_and_is_fed_what_it_said(monkeypatch):
    heard = []

    class Heard(calls.Call):
        def grade(self, answer):
            heard.append(answer)
            return {"valid": True, "right": False}

    prompt = Words().encode(letters(100).content)
    monkeypatch.setattr(material, "asked", lambda *_: [Heard(prompt, RIGHT, 24)])
    model = llama()
    record = evaluate(model, "q4_0")
    assert [row["calls"] for row in record["rows"]] == [[{"valid": True, "right": False}]] * 2
    written = list(prompt)
    for _ in range(24):
        written.append(int(plain_logits(model, written)[-1].argmax()))
    assert heard[0] == Words().decode(written[100:])
    assert heard[1] != heard[0]
