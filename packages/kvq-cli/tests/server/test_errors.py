import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import BREAKS, MODEL, ScriptedEngine

from kvq_cli.server.app import create_app
from kvq_cli.server.protocol import MOST_ITEMS, ChatRequest, CompletionRequest

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": MODEL, "prompt": "hi"}
CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"


@asynccontextmanager
async def connected(engine):
    """A client of the application without a network between them."""
    app = create_app(engine)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        yield client


def send(method, path, **request):
    async def run():
        async with connected(ScriptedEngine()) as client:
            return await client.request(method, path, **request)

    return asyncio.run(run())


def refused(answer, status, *, param=None, code=None):
    """The message of an error in OpenAI's shape."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    [(name, error)] = answer.json().items()
    assert name == "error"
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert (error["param"], error["code"]) == (param, code)
    return error["message"]


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hi"}, "messages", "list"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "text parts"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "not empty"),
        (
            {"messages": [{"role": "user", "content": "a"}] * (MOST_ITEMS + 1)},
            "messages",
            "at most 16384",
        ),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "string"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "assistant"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
            "text only",
        ),
        (
            {"messages": [{"role": "user", "content": "\ud800"}]},
            "messages[0].content[0].text",
            "surrogate",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
            "messages[0].tool_calls",
            "not supported",
        ),
        ({"max_tokens": 0}, "max_tokens", "got 0"),
        ({"max_tokens": 2.5}, "max_tokens", "integer"),
        ({"max_tokens": True}, "max_tokens", "integer"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "max_tokens"),
        ({"temperature": -1}, "temperature", "got -1"),
        ({"temperature": 2.5}, "temperature", "got 2.5"),
        ({"temperature": "0.5"}, "temperature", "number"),
        ({"temperature": float("nan")}, "temperature", "finite"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_p": 1.1}, "top_p", "1"),
        ({"top_k": -2}, "top_k", "-1"),
        ({"min_p": 1.5}, "min_p", "1"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"n": 0}, "n", "got 0"),
        ({"n": 129}, "n", "got 129"),
        ({"n": True}, "n", "integer"),
        ({"frequency_penalty": 2.1}, "frequency_penalty", "got 2.1"),
        ({"presence_penalty": "1"}, "presence_penalty", "number"),
        ({"repetition_penalty": 0}, "repetition_penalty", "0.01"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "-100 to 100"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"01": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": [1]}, "logit_bias", "an object"),
        ({"logprobs": 3}, "logprobs", "boolean"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "got 21"),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs is true"),
        ({"stop": ["a"] * 5}, "stop", "at most 4"),
        ({"stop": ""}, "stop", "empty"),
        ({"stop": [""]}, "stop", "empty"),
        ({"stream": 1}, "stream", "boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream is true"),
    ],
)
def test_a_wrong_parameter_is_named(changes, param, words):
    body = json.dumps({**CHAT, **changes})
    answer = send("POST", CHAT_PATH, content=body, headers={"Content-Type": "application/json"})
    message = refused(answer, 400, param=param, code=answer.json()["error"]["code"])
    assert param in message and words in message


@pytest.mark.parametrize(
    ("prompt", "param", "words"),
    [
        ([], "prompt", "list"),
        ([[]], "prompt", "empty"),
        (["a", 1], "prompt", "list of token ids"),
        ([1.5], "prompt", "list of token ids"),
        ({"a": 1}, "prompt", "list of token ids"),
        ([-1], "prompt", "-1"),
        ([10**30], "prompt", str(10**30)),
    ],
)
def test_a_wrong_prompt_is_explained(prompt, param, words):
    answer = send("POST", TEXT_PATH, json={**TEXT, "prompt": prompt})
    assert words in refused(answer, 400, param=param)


UNSUPPORTED = [
    (path, body, name, value)
    for path, body, names in [
        (
            CHAT_PATH,
            CHAT,
            {
                "tools": [{"type": "function"}],
                "tool_choice": "required",
                "functions": [{}],
                "response_format": {"type": "json_object"},
                "modalities": ["text", "audio"],
                "audio": {"voice": "x"},
                "prediction": {"type": "content"},
                "reasoning_effort": "high",
            },
        ),
        (
            TEXT_PATH,
            TEXT,
            {
                "best_of": 2,
                "echo": True,
                "suffix": "end",
            },
        ),
    ]
    for name, value in names.items()
]


@pytest.mark.parametrize(("path", "body", "name", "value"), UNSUPPORTED)
def test_what_would_be_ignored_is_refused(path, body, name, value):
    answer = send("POST", path, json={**body, name: value})
    message = refused(answer, 400, param=name, code="unsupported_parameter")
    assert message.startswith(f"{name} is not supported")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            CHAT_PATH,
            {
                **CHAT,
                "n": 1,
                "logprobs": False,
                "top_logprobs": None,
                "tools": [],
                "tool_choice": "auto",
                "response_format": {"type": "text"},
                "logit_bias": {},
                "presence_penalty": 0,
                "frequency_penalty": 0.0,
                "stop": None,
                "max_tokens": None,
                "temperature": None,
                "stream_options": None,
                "user": "me",
                "metadata": {"a": "b"},
                "store": False,
            },
        ),
        (TEXT_PATH, {**TEXT, "n": 1, "best_of": 1, "echo": False, "suffix": None, "stop": []}),
    ],
)
def test_what_would_change_nothing_is_accepted(path, body):
    assert send("POST", path, json=body).status_code == 200


@pytest.mark.parametrize("name", ["max_token", "größe", "chat_template_kwargs"])
def test_an_unknown_parameter_is_refused(name):
    answer = send("POST", CHAT_PATH, json={**CHAT, name: 1})
    assert name in refused(answer, 400, param=name, code="unknown_parameter")


@pytest.mark.parametrize("name", ["model", "messages"])
def test_a_missing_parameter_is_named(name):
    body = {k: v for k, v in CHAT.items() if k != name}
    answer = send("POST", CHAT_PATH, json=body)
    refused(answer, 400, param=name, code="missing_required_parameter")


@pytest.mark.parametrize(
    ("body", "content_type", "words"),
    [
        (b'{"model": "a",', "application/json", "not JSON"),
        (b"\xff\xfe{}", "application/json", "body"),
        (b"[" * 100_000, "application/json", "body"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "application/json", "body"),
        (rb'{"\ud800": 1}', "application/json", "surrogates"),
        (b"", "application/json", "JSON object"),
        (b"[]", "application/json", "JSON object"),
        (b"5", "application/json", "JSON object"),
        (json.dumps(CHAT).encode(), "text/plain", "text/plain"),
        (json.dumps(CHAT).encode(), None, "no Content-Type"),
    ],
)
def test_a_body_that_is_no_json_object_is_explained(body, content_type, words):
    headers = {"Content-Type": content_type} if content_type else {}
    answer = send("POST", CHAT_PATH, content=body, headers=headers)
    assert words in refused(answer, 400)


@pytest.mark.parametrize(("path", "body"), [(CHAT_PATH, CHAT), (TEXT_PATH, TEXT)])
def test_another_model_is_not_found_and_the_served_one_named(path, body):
    answer = send("POST", path, json={**body, "model": "gpt-4"})
    message = refused(answer, 404, param="model", code="model_not_found")
    assert "gpt-4" in message and MODEL in message


def test_routes_and_methods_that_do_not_exist_say_what_does():
    assert CHAT_PATH in refused(send("GET", "/v1/nothing"), 404)
    answer = send("GET", CHAT_PATH)
    assert "GET" in refused(answer, 405)
    assert answer.headers["allow"] == "POST"


def test_a_request_beyond_the_context_names_the_numbers():
    for stream in (False, True):
        answer = send("POST", CHAT_PATH, json={**CHAT, "max_tokens": 100_000, "stream": stream})
        message = refused(answer, 400, param="max_tokens", code="context_length_exceeded")
        assert "100000" in message and "1000" in message
    long = {"messages": [{"role": "user", "content": "word " * 2000}]}
    answer = send("POST", CHAT_PATH, json={**CHAT, **long})
    refused(answer, 400, param="messages", code="context_length_exceeded")


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [("parallel_tool_calls", 3, "give True or False"), ("audio", 1, "leave it out")],
)
def test_a_refusal_names_the_value_that_is_accepted(name, value, advice):
    answer = send("POST", CHAT_PATH, json={**CHAT, name: value})
    assert refused(answer, 400, param=name, code="unsupported_parameter").endswith(advice)


def test_an_empty_body_is_called_empty():
    answer = send("POST", CHAT_PATH, headers={"Content-Type": "application/json"})
    assert "empty" in refused(answer, 400)


def test_a_defect_is_logged_and_not_shown(caplog):
    answer = send("POST", TEXT_PATH, json={**TEXT, "prompt": [BREAKS]})
    assert "log" in refused(answer, 500)
    assert "scripted defect" not in answer.text
    assert "scripted defect" in caplog.text


def test_openais_client_sees_its_own_exceptions(client):
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(**CHAT, tools=[{}])
    assert (bad.value.param, bad.value.code) == ("tools", "unsupported_parameter")
    with pytest.raises(openai.NotFoundError, match=MODEL) as missing:
        client.chat.completions.create(**{**CHAT, "model": "gpt-4"})
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")


NAMES = sorted(ChatRequest.model_fields | CompletionRequest.model_fields)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(
    bodies=st.lists(
        st.tuples(
            st.sampled_from([(CHAT_PATH, CHAT), (TEXT_PATH, TEXT)]),
            st.dictionaries(st.sampled_from(NAMES) | st.text(), JSON, max_size=3),
        ),
        min_size=10,
        max_size=10,
    )
)
def test_no_json_whatever_makes_the_server_fail(bodies):
    async def run():
        async with connected(ScriptedEngine()) as client:
            for (path, base), changes in bodies:
                body = json.dumps({**base, **changes})
                answer = await client.post(
                    path, content=body, headers={"Content-Type": "application/json"}
                )
                assert answer.status_code in (200, 400, 404), (body, answer.text)
                if answer.status_code != 200:
                    assert answer.json()["error"]["message"]

    asyncio.run(run())


def test_the_openapi_document_describes_every_route():
    document = send("GET", "/openapi.json").json()
    assert document["paths"].keys() == {
        CHAT_PATH,
        TEXT_PATH,
        "/v1/models",
        "/v1/models/{name}",
        "/v1/kv/status",
        "/v1/kv/rebuild",
        "/health",
        "/ready",
        "/metrics",
    }
    assert "422" not in json.dumps(document) and "HTTPValidationError" not in json.dumps(document)
    prompt = document["components"]["schemas"]["CompletionRequest"]["properties"]["prompt"]
    assert {kind["type"] for kind in prompt["anyOf"]} == {"string", "array"}
