"""Logprobs in OpenAI's shapes, as its client reads them; the scripted engine's tokens count."""

import pytest
from scripted_engine import MODEL
from transformers import PreTrainedTokenizerFast

from kvq_cli.engine.params import TokenLogprobs
from kvq_cli.server.tokens import LogprobTeller, TokenTexts

HELLO = [{"role": "user", "content": "hello"}]


def test_a_chat_tells_of_each_token_and_its_alternatives(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=3, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert [each.token for each in content] == ["\0", "\1", "\2"]
    assert [each.bytes for each in content] == [[0], [1], [2]]
    assert {each.logprob for each in content} == {-0.5}
    assert [(top.token, top.logprob) for top in content[1].top_logprobs] == [
        ("\1", -0.5),
        ("\2", -1.0),
    ]


@pytest.mark.parametrize("top", [None, 0])
def test_a_chat_without_alternatives_tells_of_its_tokens_alone(client, top):
    options = {} if top is None else {"top_logprobs": top}
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=2, logprobs=True, **options
    )
    assert [each.top_logprobs for each in answer.choices[0].logprobs.content] == [[], []]


def test_nothing_is_told_unasked(client, engine):
    for options in ({}, {"logprobs": False}):
        answer = client.chat.completions.create(model=MODEL, messages=HELLO, **options)
        assert answer.choices[0].logprobs is None
    assert client.completions.create(model=MODEL, prompt="a").choices[0].logprobs is None
    assert [handle.params.logprobs for handle in engine.submitted] == [None] * 3


def test_a_continuation_tells_in_lines_of_its_tokens(client):
    answer = client.completions.create(model=MODEL, prompt="a", max_tokens=3, logprobs=1)
    told = answer.choices[0].logprobs
    assert told.tokens == ["\0", "\1", "\2"]
    assert told.token_logprobs == [-0.5] * 3
    assert told.top_logprobs == [{"\0": -0.5}, {"\1": -0.5}, {"\2": -0.5}]
    assert told.text_offset == [0, 1, 2]


def test_streams_tell_the_same_in_pieces(client):
    asked = {"model": MODEL, "max_tokens": 4, "n": 2}
    text = {"prompt": "a", "logprobs": 2, **asked}
    chat = {"messages": HELLO, "logprobs": True, "top_logprobs": 2, **asked}
    whole = client.completions.create(**text).choices[0].logprobs
    lines = {0: [], 1: []}
    for chunk in client.completions.create(**text, stream=True):
        [choice] = chunk.choices
        if choice.logprobs:
            lines[choice.index] += zip(*choice.logprobs.model_dump().values(), strict=True)
    assert [*map(list, zip(*lines[0], strict=True))] == list(whole.model_dump().values())
    assert lines[0] == lines[1]
    whole = client.chat.completions.create(**chat).choices[1].logprobs.content
    pieces = [
        each
        for chunk in client.chat.completions.create(**chat, stream=True)
        for choice in chunk.choices
        if choice.index == 1 and choice.logprobs
        for each in choice.logprobs.content
    ]
    assert pieces == whole


# ---- bytes --------------------------------------------------------------------------------------


def byte_level():
    """The real one of SmolLM2 is tested with the model; this one has every byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = pre_tokenizers.ByteLevel.alphabet()
    backend = Tokenizer(models.BPE({c: n for n, c in enumerate(sorted(letters))}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def with_byte_tokens():
    from tokenizers import Tokenizer, decoders, models

    words = ["\u2581the", "a", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, []))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_tokens_of_byte_level_vocabularies_are_the_bytes_of_the_text():
    tokenizer = byte_level()
    texts = TokenTexts(tokenizer)
    text = "naïve 漢字 🦜\n\0\x7f\xad"
    assert b"".join(map(texts, tokenizer.encode(text))) == text.encode()
    assert {texts(token) for token in range(256)} == {bytes([b]) for b in range(256)}


def test_tokens_of_vocabularies_with_byte_tokens_keep_their_spaces():
    texts = TokenTexts(with_byte_tokens())
    assert [texts(0), texts(1), texts(2 + 0xE6)] == [b" the", b"a", b"\xe6"]
    assert texts(10**6) == b""  # a gap


def test_offsets_count_characters_where_tokens_hold_parts_of_them():
    tokenizer = byte_level()
    teller = LogprobTeller(TokenTexts(tokenizer))
    tokens = tokenizer.encode("aé🦜b")
    told = [teller.text([TokenLogprobs(token, -1.0)]) for token in tokens]
    assert [each.text_offset[0] for each in told] == [0, 1, 1, 2, 2, 2, 2, 3]
    assert told[1].tokens == ["bytes:\\xc3"]


def test_a_token_without_probability_is_valid_json(engine):
    infinite = (TokenLogprobs(65, float("-inf"), ((66, float("-inf")),)),)
    teller = LogprobTeller(TokenTexts(engine.tokenizer))
    told = teller.text(infinite), teller.chat(infinite)
    assert [each.model_dump_json().count("-9999.0") for each in told] == [3, 2]
