import httpx
import openai
import pytest
from http_server import client_of, serving
from scripted_engine import MODEL, ScriptedEngine

from kvq_cli.engine.params import SamplingParams

HELLO = [{"role": "user", "content": "hello"}]
PROMPT = "user>hello\nassistant>"


def said(prompt_tokens, words=5):
    return "".join(f"{prompt_tokens}:{n} " for n in range(words))


def test_a_chat_answers_with_its_usage(client, engine):
    answer = client.chat.completions.create(model=MODEL, messages=HELLO)
    [choice] = answer.choices
    assert choice.message.content == said(len(PROMPT))
    assert (choice.message.role, choice.index, choice.finish_reason) == ("assistant", 0, "stop")
    assert (answer.model, answer.object) == (MODEL, "chat.completion")
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage.model_dump(include={"prompt_tokens", "completion_tokens"}) == {
        "prompt_tokens": len(PROMPT),
        "completion_tokens": 5,
    }
    assert answer.usage.total_tokens == len(PROMPT) + 5
    # the template writes its own special tokens: none is added
    assert engine.submitted[0].prompt == [ord(c) for c in PROMPT]


def test_max_tokens_ends_an_answer_with_length(client):
    for name in ("max_tokens", "max_completion_tokens"):
        answer = client.chat.completions.create(model=MODEL, messages=HELLO, **{name: 3})
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 3


def test_a_stream_gives_the_role_then_text_then_the_reason(client):
    chunks = list(client.chat.completions.create(model=MODEL, messages=HELLO, stream=True))
    deltas = [chunk.choices[0].delta.model_dump(exclude_unset=True) for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[1:] == [{"content": f"{len(PROMPT)}:{n} "} for n in range(5)] + [{}]
    assert [c.choices[0].finish_reason for c in chunks] == [None] * 6 + ["stop"]
    assert len({(c.id, c.created, c.model, c.object) for c in chunks}) == 1
    assert chunks[0].object == "chat.completion.chunk"
    assert "usage" not in chunks[0].model_fields_set


def test_a_stream_counts_tokens_at_its_end_when_asked(client):
    stream = client.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    assert all(c.usage is None and c.choices for c in chunks)
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(PROMPT), 5)


def test_a_stream_on_the_wire_is_server_sent_events(url):
    body = {"model": MODEL, "messages": HELLO, "stream": True}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    events = answer.text.split("\n\n")
    assert all(event.startswith("data: {") for event in events[:-2])
    assert events[-2:] == ["data: [DONE]", ""]


def test_sampling_reaches_the_engine(client, engine):
    client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=4,
        temperature=0.5,
        top_p=0.9,
        seed=-7,
        stop=["a", "b"],
        presence_penalty=-0.5,
        frequency_penalty=1.5,
        logit_bias={"7": -100, "0": 1.5},
        extra_body={"top_k": 40, "min_p": 0.1, "ignore_eos": True, "repetition_penalty": 1.1},
    )
    client.chat.completions.create(
        model=MODEL, messages=HELLO, temperature=0, stop="x", extra_body={"top_k": -1}
    )
    client.chat.completions.create(model=MODEL, messages=HELLO)
    assert [handle.params for handle in engine.submitted] == [
        SamplingParams(
            max_tokens=4,
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            min_p=0.1,
            presence_penalty=-0.5,
            frequency_penalty=1.5,
            repetition_penalty=1.1,
            logit_bias=((7, -100.0), (0, 1.5)),
            seed=-7,
            stop=("a", "b"),
            ignore_eos=True,
        ),
        SamplingParams(temperature=0.0, stop=("x",)),
        SamplingParams(),
    ]


def test_n_answers_share_one_prompt(client, engine):
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {said(len(PROMPT))}
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), 15)
    assert answer.usage.prompt_tokens_details.cached_tokens == len(PROMPT) // 2
    stream = client.chat.completions.create(model=MODEL, messages=HELLO, n=2, stream=True)
    texts, ends = ["", ""], []
    for chunk in stream:
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        ends += [choice.index] if choice.finish_reason else []
    assert texts == [said(len(PROMPT))] * 2
    assert sorted(ends) == [0, 1]


def test_text_parts_are_joined_by_lines_and_developers_are_systems(client, engine):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": parts},
        ],
    )
    text = "".join(map(chr, engine.submitted[0].prompt))
    assert text == "system>be brief\nuser>one\ntwo\nassistant>"


def test_a_client_may_send_an_answer_back_as_it_got_it(client, engine):
    first = client.chat.completions.create(model=MODEL, messages=HELLO)
    again = [*HELLO, first.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
    client.chat.completions.create(model=MODEL, messages=again)
    text = "".join(map(chr, engine.submitted[1].prompt))
    assert text == f"{PROMPT}{said(len(PROMPT))}\nuser>more\nassistant>"


def test_a_model_without_chat_template_names_the_way_that_works():
    engine = ScriptedEngine(chat_template=None)
    with serving(engine) as url, client_of(url) as client:
        with pytest.raises(openai.BadRequestError, match="/v1/completions") as caught:
            client.chat.completions.create(model=MODEL, messages=HELLO)
        assert caught.value.param == "messages"
        assert client.completions.create(model=MODEL, prompt="x").choices[0].text == said(2)


def test_what_the_template_refuses_is_the_clients_error(client):
    with pytest.raises(openai.BadRequestError, match="roles must alternate") as caught:
        client.chat.completions.create(model=MODEL, messages=HELLO * 2)
    assert caught.value.param == "messages"


def test_a_long_prompt_is_read_like_a_short_one():
    # long enough to be tokenized in a thread
    engine = ScriptedEngine(max_model_len=100_000)
    with serving(engine) as url, client_of(url) as client:
        answer = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "ä" * 50_000}]
        )
    assert answer.usage.prompt_tokens == len("user>\nassistant>") + 50_000
