"""Bodies made to cost more than they are: memory, the event loop's time, long answers."""

from __future__ import annotations

import asyncio
import gzip
import json
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from http_server import client_of, connected, serving
from pydantic import BaseModel, ValidationError
from scripted_engine import MODEL, ScriptedEngine
from tiny_models import llama, make_async_engine, make_engine

from kvq_cli.server import prompts
from kvq_cli.server.kv_protocol import RebuildRequest
from kvq_cli.server.limits import MOST_BODIES, HttpOptions
from kvq_cli.server.protocol import (
    ChatRequest,
    CompletionRequest,
    Message,
    StreamOptions,
    TextPart,
)

BODY = {"model": MODEL, "prompt": "a"}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "a"}]}
FIELDS = [
    (kind, name)
    for kind in (ChatRequest, CompletionRequest, Message, TextPart, StreamOptions, RebuildRequest)
    for name in kind.model_fields
]
MANY = 1000


def errors(kind: type[BaseModel], body: Any) -> int:
    """How many errors pydantic makes of a body."""
    try:
        kind.model_validate(body)
    except ValidationError as error:
        return error.error_count()
    return 0


@pytest.mark.parametrize(("kind", "name"), FIELDS)
def test_of_many_wrong_items_the_first_is_told_and_none_other_costs(
    kind: type[BaseModel], name: str
) -> None:
    for wrong in (
        [0] * MANY,
        [{}] * MANY,
        [[0.5] * MANY] * 2,
        {str(n): "x" for n in range(MANY)},
        [{"role": "user", "content": [0] * MANY}],
        [{"role": "user", "content": "a"} | {str(n): 0 for n in range(MANY)}],
    ):
        # one for the field, and one for each other that is missing
        assert errors(kind, {name: wrong}) <= len(kind.model_fields)


def test_of_many_unknown_parameters_the_first_is_told() -> None:
    for kind in {kind for kind, _ in FIELDS}:
        strangers = {f"x{n}": 0 for n in range(MANY)}
        assert errors(kind, strangers) <= 1 + len(kind.model_fields)
    with serving(ScriptedEngine()) as url:
        answer = httpx.post(f"{url}/v1/completions", json={**BODY, "b": 1, "a": 2})
        assert answer.json()["error"]["param"] == "b"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {**BODY, "model": "m" * 10**6}, 404),
        ("/v1/completions", {**BODY, "p" * 10**6: 1}, 400),
        ("/v1/completions", {**BODY, "stop": [1, "s" * 10**6]}, 400),
        ("/v1/chat/completions", {**CHAT, "messages": [{"role": "r" * 10**6}]}, 400),
        ("/v1/chat/completions", {**CHAT, "response_format": {"type": "x" * 10**6}}, 400),
        ("/v1/kv/rebuild", {"num_tokens": 10**4000}, 400),
        ("/v1/kv/rebuild", {"kv_cache_dtype": "0:bf16," * 10**5}, 400),
        ("/v1/models/" + "m" * 10**4, None, 404),
        ("/" + "n" * 10**4, None, 404),
    ],
)
def test_an_error_is_short_whatever_it_is_about(
    path: str, body: dict[str, Any] | None, status: int
) -> None:
    with serving(make_async_engine(make_engine(llama(), attention_backend="reference"))) as url:
        where = url + path
        answer = httpx.get(where) if body is None else httpx.post(where, json=body, timeout=60)
        if path == "/v1/completions" and status == 400:
            assert answer.status_code in (400, 404)
        else:
            assert answer.status_code == status
        assert answer.json()["error"]["message"] and len(answer.content) < 2500


@pytest.mark.usefixtures("one_thread")
def test_whole_numbers_of_any_size_are_obeyed_or_refused() -> None:
    """In every parameter: none may reach arithmetic that has no room for it."""
    base = {"model": "tiny", "prompt": [5], "max_tokens": 2, "temperature": 1, "seed": 1}
    rebuild = {"kv_cache_dtype": "fp32"}
    with serving(make_async_engine(make_engine(llama(), attention_backend="reference"))) as url:
        for path, kind, body in (
            ("/v1/completions", CompletionRequest, base),
            ("/v1/kv/rebuild", RebuildRequest, rebuild),
        ):
            for name in kind.model_fields:
                for value in (
                    2**31,
                    2**53 + 1,
                    2**63 - 1,
                    2**63,
                    2**64,
                    10**30,
                    -(2**63),
                    -(10**30),
                ):
                    answer = httpx.post(url + path, json={**body, name: value}, timeout=60)
                    assert answer.status_code in (200, 400), (name, value, answer.text)


def test_a_compressed_body_is_refused_by_what_it_is() -> None:
    engine = ScriptedEngine()
    with serving(engine) as url:
        answer = httpx.post(
            f"{url}/v1/completions",
            content=gzip.compress(json.dumps(BODY).encode()),
            headers={"Content-Type": "application/json", "Content-Encoding": "gzip"},
        )
        assert answer.status_code == 415 and "'gzip'" in answer.json()["error"]["message"]
    assert not engine.submitted


def test_bodies_of_all_requests_together_have_a_limit() -> None:
    engine = ScriptedEngine()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with serving(engine, HttpOptions(max_body_bytes=1000)) as url:
        with ExitStack() as stack:
            for _ in range(MOST_BODIES):  # nearly whole, and never more
                client = stack.enter_context(connected(url))
                client.sendall(head + b"Content-Length: 1000\r\n\r\n" + b" " * 960)
            for _ in range(200):  # until all of those are here
                answer = httpx.post(f"{url}/v1/completions", json={**BODY, "user": "u" * 700})
                if answer.status_code != 200:
                    break
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "1"
            assert answer.headers["connection"] == "close"
            assert "16,000" in answer.json()["error"]["message"]
            assert httpx.post(f"{url}/v1/completions", json=BODY).status_code == 200
        with client_of(url) as client:  # they left
            for _ in range(3 * MOST_BODIES):
                client.completions.create(**BODY, user="u" * 700)


# ---- prompts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "param"), [("chat/completions", "messages"), ("completions", "prompt")]
)
def test_a_text_far_too_long_costs_no_more_than_one_that_fits(path: str, param: str) -> None:
    engine = ScriptedEngine()
    read = []
    encode = engine.tokenizer.encode
    engine.tokenizer.encode = lambda text, **how: read.append(len(text)) or encode(text, **how)
    long = "a" * 3_000_000
    body = (
        {**BODY, "prompt": long}
        if param == "prompt"
        else {**CHAT, "messages": [{"role": "user", "content": long}]}
    )
    with serving(engine) as url:
        answer = httpx.post(f"{url}/v1/{path}", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["param"] == param
        assert "1000" in error["message"] and "3,000,0" in error["message"]
    assert sum(read) < 50_000


def test_a_text_of_long_tokens_fits_however_long_it_is() -> None:
    class Long:
        """A token a thousand characters."""

        def encode(self, text: str, **_: Any) -> list[int]:
            return [7] * -(-len(text) // 1000)

    async def run(room: int) -> int:
        found = await prompts.encode(
            Long(), "a" * 500_000, add_special_tokens=True, room=room, param="prompt"
        )
        return len(found)

    assert asyncio.run(run(500)) == 500
    assert asyncio.run(run(2000)) == 500
