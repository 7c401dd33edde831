"""OpenAI's client of a real engine over a random model, held against transformers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import torch
from http_server import client_of, serving, wait_for
from tiny_models import Letters, llama, make_async_engine, make_engine, random_prompt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvq_cli.engine.engine import Engine

PROMPT = random_prompt(17)
ENDLESS = {"ignore_eos": True}


@pytest.fixture
def engine(one_thread: None) -> Engine:
    return make_engine(llama(), attention_backend="reference", num_pages=96)


@pytest.fixture
def client(engine: Engine) -> Iterator[openai.OpenAI]:
    with serving(make_async_engine(engine)) as url, client_of(url) as client:
        yield client


def ask(client: openai.OpenAI, prompt: list[int] = PROMPT, **options: Any) -> Any:
    given = {"max_tokens": 16, "temperature": 0, "extra_body": ENDLESS, **options}
    return client.completions.create(model="tiny", prompt=prompt, **given)


def text_of(stream: Any) -> str:
    return "".join(chunk.choices[0].text for chunk in stream)


def pages_used(engine: Engine) -> int:
    return sum(tier.pages_used for tier in engine.stats().tiers)


def test_logprobs_are_those_of_transformers_forward(client: openai.OpenAI) -> None:
    choice = ask(client, logprobs=5).choices[0]
    answer = Letters().encode(choice.text)
    model = llama()
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *answer]])).logits[0, len(PROMPT) - 1 : -1]
    want = logits.log_softmax(-1)
    told = choice.logprobs
    assert told.tokens == list(choice.text)
    assert told.text_offset == list(range(16))
    own = want[torch.arange(16), answer]
    assert told.token_logprobs == pytest.approx(own.tolist(), abs=1e-4)  # sums of float32
    for row, top in zip(want, told.top_logprobs, strict=True):
        values, tokens = row.topk(5)
        named = dict(zip(map(Letters().decode, tokens[:, None]), values.tolist(), strict=True))
        assert top == pytest.approx(named, abs=1e-4)


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_a_repetition_penalty_gives_transformers_own_tokens(
    client: openai.OpenAI, penalty: float
) -> None:
    got = ask(client, max_tokens=40, extra_body={**ENDLESS, "repetition_penalty": penalty})
    ids = torch.tensor([PROMPT])
    want = llama().generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=40,
        do_sample=False,
        repetition_penalty=penalty,
        pad_token_id=0,
        eos_token_id=None,
    )
    assert Letters().encode(got.choices[0].text) == want[0, len(PROMPT) :].tolist()
    assert got.choices[0].text != ask(client, max_tokens=40).choices[0].text


def test_a_seed_gives_the_same_answers_again_alone_and_in_any_company(
    client: openai.OpenAI,
) -> None:
    def drawn(seed: int, **options: Any) -> list[str]:
        answer = ask(client, temperature=1.2, top_p=0.9, seed=seed, max_tokens=24, **options)
        return [choice.text for choice in answer.choices]

    alone = [drawn(seed, n=3) for seed in range(4)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda seed: drawn(seed % 4, n=3), range(8)))
    assert together == alone * 2
    assert len({text for texts in alone for text in texts}) == 12
    assert drawn(2) == alone[2][:1]


def test_a_biased_token_is_always_said_or_never_and_one_that_is_none_is_refused(
    client: openai.OpenAI,
) -> None:
    said = Letters().encode(ask(client, max_tokens=30).choices[0].text)
    banned = ask(client, max_tokens=30, logit_bias={str(token): -100 for token in set(said)})
    assert not set(said) & set(Letters().encode(banned.choices[0].text))
    wanted = ask(client, max_tokens=30, temperature=1, logit_bias={"40": 100}, logprobs=0)
    assert Letters().encode(wanted.choices[0].text) == [40] * 30
    assert min(wanted.choices[0].logprobs.token_logprobs) < -1, "they are the model's own"
    with pytest.raises(openai.BadRequestError, match="vocabulary of 96") as caught:
        ask(client, logit_bias={"96": 1})
    assert caught.value.param == "logit_bias"


def test_stop_strings_end_a_stream_before_they_show(client: openai.OpenAI) -> None:
    whole = ask(client, max_tokens=40).choices[0].text
    stop = whole[20:22]
    stream = list(ask(client, max_tokens=40, stop=[stop, "never said"], stream=True))
    assert text_of(stream) == whole[: whole.index(stop)]
    assert stream[-1].choices[0].finish_reason == "stop"


def test_an_exception_in_a_kernel_is_that_requests_500_and_no_other_notices(
    client: openai.OpenAI, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    bad, forward = random_prompt(9, 5), engine.runner.forward

    def broken(step: Any) -> torch.Tensor:
        for request, _ in step.work:
            if request.tokens[:9] == bad and request.completion_tokens == 4:
                raise RuntimeError("Triton Error: injected")
        return forward(step)

    engine.runner.forward = broken  # type: ignore[method-assign]
    want = ask(client, max_tokens=60).choices[0].text
    with ThreadPoolExecutor(2) as pool:
        streams = [
            pool.submit(lambda: text_of(ask(client, max_tokens=60, stream=True))) for _ in range(2)
        ]
        with pytest.raises(openai.InternalServerError, match="Triton Error: injected") as caught:
            ask(client, bad)
        assert (caught.value.status_code, caught.value.code) == (500, "request_failed")
        with pytest.raises(openai.APIError, match="Triton Error: injected"):
            text_of(ask(client, bad, stream=True))
        assert [stream.result(60) for stream in streams] == [want] * 2
    assert ask(client, max_tokens=60).choices[0].text == want
    assert "Triton Error: injected" in caplog.text
    assert pages_used(engine) == 0


def test_f29_a_prompt_beyond_the_pool_is_refused_at_once_with_both_numbers(
    client: openai.OpenAI, engine: Engine
) -> None:
    """A kind of admission: what can never fit waits for ever, with an answer of status 200."""
    for stream in (False, True):
        for options in ({"prompt": random_prompt(300)}, {"max_tokens": 300}):
            with pytest.raises(openai.BadRequestError, match=r"\b300\b.* 256 tokens") as caught:
                ask(client, stream=stream, **options)
            assert caught.value.code == "context_length_exceeded"
    assert not engine.has_work


def test_f45_a_conversation_finds_its_prefix_whatever_is_asked_on_the_side(
    client: openai.OpenAI,
) -> None:
    """A kind of prefix cache: a short side call drains what the next turns would have found."""
    talks = {seed: random_prompt(30, seed) for seed in (1, 2)}
    for turn in range(3):
        for seed, talk in talks.items():
            answer = ask(client, talk, max_tokens=6)
            cached = answer.usage.prompt_tokens_details.cached_tokens
            # all but what the user adds and the last token of an answer, which was not computed
            assert cached == (len(talk) - 6 if turn else 0)
            added = Letters().encode(answer.choices[0].text) + random_prompt(5, turn)
            talks[seed] = talk + added
            ask(client, random_prompt(8, 10 * turn + seed), max_tokens=2)  # the side call


def test_sixty_four_streams_at_once_and_those_that_leave_give_their_pages_back(
    client: openai.OpenAI, engine: Engine
) -> None:
    prompts = [random_prompt(5 + n % 20, n) for n in range(64)]
    alone = [ask(client, prompt, max_tokens=12).choices[0].text for prompt in prompts]

    def stream(n: int) -> str | None:
        chunks = ask(client, prompts[n], max_tokens=200 if n % 4 == 3 else 12, stream=True)
        if n % 4 == 3:  # the client leaves
            for _, _chunk in zip(range(n % 3), chunks, strict=False):
                pass
            chunks.close()
            return None
        return text_of(chunks)

    order = random.Random(0).sample(range(64), 64)
    with ThreadPoolExecutor(64) as pool:
        texts = dict(zip(order, pool.map(stream, order), strict=True))
    assert [texts[n] for n in range(64)] == [None if n % 4 == 3 else alone[n] for n in range(64)]
    wait_for(lambda: not engine.has_work)
    assert pages_used(engine) == 0
    engine.cache.space.check_integrity()


def test_a_character_of_several_tokens_comes_whole_and_its_bytes_are_told(
    one_thread: None,
) -> None:
    """One token a byte; the model's part is played by the text that it is to say."""
    text = "naïve 漢字 🦜🏽 end"
    tokenizer = byte_level_tokenizer()
    said = tokenizer.encode(text)
    assert len(said) == len(text.encode())
    engine = make_engine(llama(), attention_backend="reference", tokenizer=tokenizer)

    def spelled(step: Any) -> torch.Tensor:
        logits = torch.full((len(step.work), 256), -20.0)
        for row, (request, _) in enumerate(step.work):
            logits[row, said[min(request.completion_tokens, len(said) - 1)]] = 20.0
        return logits

    engine.runner.forward = spelled  # type: ignore[method-assign]
    options = {"max_tokens": len(said), "logprobs": True, "temperature": 0}
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "?"}], **options}
    with serving(make_async_engine(engine)) as url, client_of(url) as client:
        whole = client.chat.completions.create(**asked, extra_body=ENDLESS).choices[0]
        chunks = list(client.chat.completions.create(**asked, stream=True, extra_body=ENDLESS))
    assert whole.message.content == text
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == text
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    told = [each for c in chunks for each in getattr(c.choices[0].logprobs, "content", None) or []]
    for found in (told, whole.logprobs.content):
        assert bytes(byte for each in found for byte in each.bytes) == text.encode()


def byte_level_tokenizer() -> Any:
    """One token a byte, and a template that says one letter whatever is asked."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: n for n, c in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template="!")
