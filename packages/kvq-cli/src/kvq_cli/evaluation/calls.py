"""Calls of a function that a model writes as JSON, as agents ask it to.

What perplexity averages away is fatal there: one wrong quote, and nothing can be parsed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

KNOWN = (("Anna", 31, "Oslo"), ("Pedro", 47, "Lisbon"), ("Mei", 25, "Taipei"), ("Karl", 62, "Rome"))
ASKED = (
    ("Ingrid", 38, "Bergen"),
    ("Tomas", 54, "Prague"),
    ("Aisha", 29, "Cairo"),
    ("Lucia", 71, "Madrid"),
    ("Kenji", 43, "Osaka"),
    ("Victor", 19, "Nice"),
)
SPARE = 8  # tokens of an answer beyond those of the right one

Person = tuple[str, int, str]


@dataclass(frozen=True, slots=True)
class Call:
    """Examples, a sentence, and what the model is to make of it.

    Attributes
    ----------
    prompt : tokens
    right : the JSON that the sentence asks for
    new_tokens : that an answer may take
    """

    prompt: list[int]
    right: str
    new_tokens: int

    def grade(self, answer: str) -> dict[str, bool]:
        """Whether an answer's first line is a call that can be carried out, and the right one."""
        wanted = json.loads(self.right)
        try:
            found = json.loads(answer.strip().partition("\n")[0])
        except ValueError:
            return {"valid": False, "right": False}
        return {"valid": _shape(found) == _shape(wanted), "right": found == wanted}


def asked(tokenizer: Any, start: Sequence[int], context: int) -> list[Call]:
    """The calls that are asked for; none where a context has no room for the examples."""

    def encode(words: str) -> list[int]:
        return list(tokenizer.encode(words, add_special_tokens=False))

    examples = "".join(f"{_question(one)} {_answer(one)}\n" for one in KNOWN)
    found = []
    for person in ASKED:
        right = _answer(person)
        prompt = [*start, *encode(examples + _question(person))]
        new_tokens = len(encode(f" {right}")) + SPARE
        if len(prompt) + new_tokens > context:
            return []
        found.append(Call(prompt, right, new_tokens))
    return found


def _question(person: Person) -> str:
    name, age, city = person
    return f"User: {name} is {age} years old and lives in {city}.\nCall:"


def _answer(person: Person) -> str:
    name, age, city = person
    return json.dumps({"name": "add_person", "arguments": {"name": name, "age": age, "city": city}})


def _shape(value: Any) -> Any:
    """The names and types of what is asked for, without its values."""
    if isinstance(value, dict):
        return {key: _shape(each) for key, each in value.items()}
    return type(value)
