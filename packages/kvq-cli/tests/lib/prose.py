"""Plain English of any length, the same every time, for prompts of real models."""

from itertools import count

PEOPLE = ["The gardener", "A young pilot", "My neighbour", "The old librarian", "Her brother"]
DEEDS = [
    "walked along the river before sunrise",
    "repaired the broken clock in the hall",
    "counted the boats that came into the harbour",
    "wrote a long letter about the weather",
    "planted three rows of beans behind the house",
    "listened to the rain on the roof",
    "carried the heavy boxes up the stairs",
]
REASONS = [
    "because the market opened early",
    "although nobody had asked for it",
    "while the children were still asleep",
    "and later told everyone about it",
]


def prose(num_characters: int, start: int = 0) -> str:
    """At least `num_characters` of text; another `start` gives another text."""
    out = ""
    for i in count(start):
        if len(out) >= num_characters:
            return out
        day = 1 + (i * 7) % 28
        out += (
            f"{PEOPLE[i % 5]} {DEEDS[(i * 3) % 7]} {REASONS[(i // 2) % 4]}. "
            f"That was on day {day} of the month. "
        )
    raise AssertionError


def token_prompt(tokenizer: object, length: int, start: int = 0) -> list[int]:
    """Exactly `length` tokens of prose, with the tokenizer's own beginning."""
    ids: list[int] = tokenizer(prose(8 * length + 100, start))["input_ids"]  # type: ignore[operator]
    assert len(ids) >= length
    return ids[:length]
