from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvq_cli.engine.detokenize import Detokenizer


class Bytes:
    """Each token is one byte; an incomplete character decodes to U+FFFD."""

    def decode(self, tokens, **_):
        return bytes(tokens).decode("utf-8", errors="replace")


class Spaces:
    """A word piece at the start of a text loses its leading space, as SentencePiece's do."""

    def __init__(self, pieces):
        self.pieces = pieces

    def decode(self, tokens, **_):
        return "".join(self.pieces[t] for t in tokens).removeprefix(" ")


@given(st.text(min_size=1))
def test_pieces_join_to_the_text_and_hold_no_half_characters(text):
    detokenizer = Detokenizer(Bytes())
    pieces = [detokenizer.push(b) for b in text.encode()] + [detokenizer.finish()]
    assert "".join(pieces) == text
    assert all("\ufffd" not in p for p in pieces) or "\ufffd" in text


def test_a_cut_off_character_is_shown_at_the_end_only():
    detokenizer = Detokenizer(Bytes())
    half = "é".encode()[0]
    assert detokenizer.push(half) == ""
    assert detokenizer.finish() == "\ufffd"


def test_spaces_between_words_survive_and_the_prompt_is_not_repeated():
    tokenizer = Spaces([" once", " upon", " a", " time"])
    detokenizer = Detokenizer(tokenizer, context=[0, 1])
    assert detokenizer.push(2) + detokenizer.push(3) == " a time"


@given(
    st.text(alphabet="ab", max_size=12),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_text_ends_before_the_first_stop_string(text, stops):
    detokenizer, out = Detokenizer(Bytes(), stops), ""
    for i, byte in enumerate(text.encode()):
        out += detokenizer.push(byte)
        if detokenizer.stopped:
            seen = text[: i + 1]
            break
    else:
        seen = text
    out += detokenizer.finish()
    ends = [at for s in stops if (at := seen.find(s)) >= 0]
    assert detokenizer.stopped == bool(ends)
    assert out == (seen[: min(ends)] if ends else seen)


@given(st.text(alphabet="a 🦙é", min_size=1, max_size=8), st.data())
def test_a_prompt_that_ends_inside_a_character_loses_nothing(text, data):
    raw = text.encode()
    cut = data.draw(st.integers(0, len(raw)))
    detokenizer = Detokenizer(Bytes(), context=raw[:cut])
    out = "".join(detokenizer.push(b) for b in raw[cut:]) + detokenizer.finish()
    whole = len(raw[:cut].decode(errors="ignore"))
    assert out == (text[whole:] if cut < len(raw) else "")


def test_a_possible_stop_string_is_held_back_until_decided():
    detokenizer = Detokenizer(Bytes(), ["END"])
    assert [detokenizer.push(b) for b in b"xENxEND"] == ["x", "", "", "ENx", "", "", ""]
    assert detokenizer.stopped


def test_streamed_text_never_shrinks():
    detokenizer = Detokenizer(Bytes(), ["zz"])
    shown = [""]
    for b in b"abzabzz":
        shown.append(shown[-1] + detokenizer.push(b))
    assert all(b.startswith(a) for a, b in pairwise(shown))
    assert shown[-1] == "abzab"


@pytest.mark.parametrize("stop", [["a"], ["ab", "b"]])
def test_two_stops_in_one_token_end_at_the_earlier(stop):
    class Words:
        def decode(self, tokens, **_):
            return "".join(["xaby"][t] for t in tokens)

    detokenizer = Detokenizer(Words(), stop)
    assert detokenizer.push(0) == "x"
    assert detokenizer.stopped
