"""What keeps strangers, floods and slow clients from harming the others."""

import asyncio
import json
import time

import httpx
import openai
import pytest
from http_server import client_of, connected, serving, wait_for
from scripted_engine import MODEL, ScriptedEngine

from kvq_cli.config import ConfigError
from kvq_cli.engine.params import Delta
from kvq_cli.server import limits, streaming
from kvq_cli.server.errors import ApiError
from kvq_cli.server.limits import HttpOptions
from kvq_cli.server.places import LONGEST_WAIT, Places

BODY = {"model": MODEL, "prompt": "a"}


def slow_engine(**options):
    return ScriptedEngine(words=10_000, pause=0.01, **options)


def post(body, **headers):
    """The bytes of a request to /v1/completions."""
    lines = [f"{name}: {value}" for name, value in headers.items()]
    head = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", *lines]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def error_of(answer, status):
    assert answer.status_code == status, answer.text
    [(name, error)] = answer.json().items()
    assert name == "error" and error.keys() == {"message", "type", "param", "code"}
    return error


# ---- the key ------------------------------------------------------------------------------------


def test_only_who_has_the_key_is_answered_and_health_is_open():
    with serving(ScriptedEngine(), HttpOptions(api_key="s3cret")) as url:
        for path in ("/health", "/ready"):
            assert httpx.get(url + path).status_code == 200
        for path in ("/v1/models", "/metrics", "/v1/kv/status", "/openapi.json", "/nowhere"):
            for wrong in (
                "",
                "Bearer",
                "s3cret",
                "Bearer s3cre",
                "Bearer s3cret2",
                "Basic s3cret",
                "Bearer ß",
            ):
                headers = {"Authorization": wrong.encode()} if wrong else {}
                answer = httpx.get(url + path, headers=headers)
                error = error_of(answer, 401)
                assert error["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
            for scheme in ("Bearer", "bearer", "BEARER "):  # RFC 9110: in any case
                known = httpx.get(url + path, headers={"Authorization": f"{scheme} s3cret"})
                assert known.status_code == (404 if path == "/nowhere" else 200)
        with client_of(url, "wrong") as client, pytest.raises(openai.AuthenticationError):
            client.completions.create(**BODY)
        with client_of(url, "s3cret") as client:
            assert client.completions.create(**BODY).choices[0].text


def test_a_stranger_starts_nothing():
    engine = ScriptedEngine()
    with serving(engine, HttpOptions(api_key="s3cret")) as url:
        error_of(httpx.post(f"{url}/v1/completions", json=BODY), 401)
    assert not engine.submitted


# ---- bodies -------------------------------------------------------------------------------------


@pytest.mark.parametrize("declared", [True, False])
def test_a_large_body_is_refused_with_both_numbers(declared):
    engine = ScriptedEngine()
    with serving(engine, HttpOptions(max_body_bytes=1000)) as url:
        body = json.dumps({**BODY, "prompt": "a" * 2000}).encode()
        headers = {"Content-Type": "application/json"}
        content = body if declared else (body[n : n + 100] for n in range(0, len(body), 100))
        answer = httpx.post(f"{url}/v1/completions", content=content, headers=headers)
        message = error_of(answer, 413)["message"]
        assert "at most 1,000" in message
        assert f"{len(body):,} bytes" in message if declared else "bytes or more" in message
        assert httpx.post(f"{url}/v1/completions", json=BODY).status_code == 200
    assert len(engine.submitted) == 1


def test_a_body_that_is_declared_large_is_refused_before_it_is_sent():
    with serving(ScriptedEngine()) as url, connected(url) as connection:
        connection.sendall(post(b"{", **{"Content-Length": 10**12}))
        assert b" 413 " in connection.recv(1000)


def test_a_body_that_never_comes_is_given_up(monkeypatch):
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.2)
    with serving(ScriptedEngine()) as url, connected(url) as connection:
        connection.sendall(post(b"{", **{"Content-Length": 100}))
        answer = connection.recv(1000)
        assert b" 408 " in answer and b"0.2 s" in answer + connection.recv(1000)


# ---- floods -------------------------------------------------------------------------------------


def test_beyond_the_queue_requests_are_refused_with_a_time():
    engine = slow_engine()
    engine.max_running_requests = 2
    with serving(engine, HttpOptions(max_queued_requests=3)) as url, client_of(url) as client:
        streams = [client.completions.create(**BODY, stream=True) for _ in range(4)]
        answer = httpx.post(f"{url}/v1/completions", json={**BODY, "n": 2})
        error = error_of(answer, 429)
        assert error["code"] == "queue_full"
        assert "4 answers run or wait, of at most 5" in error["message"]
        assert 1 <= int(answer.headers["retry-after"]) <= LONGEST_WAIT
        streams.append(client.completions.create(**BODY, stream=True))
        with pytest.raises(openai.RateLimitError):  # a stream is refused before it begins
            client.completions.create(**BODY, stream=True)
        next(iter(streams[1]))  # nobody who runs was disturbed
        assert len(engine.live) == 5
        streams[0].close()
        wait_for(lambda: len(engine.live) == 4)
        assert client.completions.create(**BODY, max_tokens=1).choices[0].text
        for stream in streams:
            stream.close()
        wait_for(lambda: not engine.live)
        assert len(engine.submitted) == 6


def test_a_flood_costs_no_reading_of_its_prompts():
    engine = slow_engine()
    engine.max_running_requests = 1
    read = []
    encode = engine.tokenizer.encode
    engine.tokenizer.encode = lambda text, **how: read.append(text) or encode(text, **how)
    with serving(engine, HttpOptions(max_queued_requests=0)) as url, client_of(url) as client:
        stream = client.completions.create(**BODY, stream=True)
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "long"}]}
        error_of(httpx.post(f"{url}/v1/completions", json={**BODY, "prompt": "long"}), 429)
        error_of(httpx.post(f"{url}/v1/chat/completions", json=chat), 429)
        stream.close()
    assert [text for text in read if "long" in text] == []


def test_openais_client_tries_again_after_the_time_it_is_told():
    engine = slow_engine()
    engine.max_running_requests = 1
    with serving(engine, HttpOptions(max_queued_requests=0)) as url, client_of(url) as client:
        first = client.completions.create(**BODY, max_tokens=50, stream=True)
        next(iter(first))
        start = time.monotonic()
        patient = client.with_options(max_retries=3)
        assert patient.completions.create(**BODY, max_tokens=1).choices[0].text
        assert time.monotonic() - start >= 0.9
        first.close()


def test_more_answers_than_there_are_places_are_refused_for_good():
    with serving(ScriptedEngine(), HttpOptions(max_queued_requests=4)) as url:
        error = error_of(httpx.post(f"{url}/v1/completions", json={**BODY, "n": 21}), 400)
        assert error["param"] == "n" and "21" in error["message"] and "20" in error["message"]
        body = {**BODY, "prompt": ["a"] * 21}
        error = error_of(httpx.post(f"{url}/v1/completions", json=body), 400)
        assert error["param"] == "prompt"


def test_every_place_comes_back_however_a_request_ends():
    engine = ScriptedEngine()
    with serving(engine, HttpOptions(max_queued_requests=0)) as url:
        long = {"prompt": "a" * 2000}
        for changes, status in [
            ({"prompt": ["a", "b"]}, 200),
            ({"prompt": ["a", "b"], "stream": True}, 200),
            ({"prompt": [[97], [0x110000]]}, 400),
            (long, 400),
            ({"prompt": [[97], [2]]}, 503),
            ({"prompt": [[97], [3]]}, 500),
            ({"prompt": [[97], [3]], "stream": True}, 200),
        ]:
            assert httpx.post(f"{url}/v1/completions", json=BODY | changes).status_code == status
        # all sixteen at once
        assert httpx.post(f"{url}/v1/completions", json={**BODY, "n": 16}).status_code == 200


def test_the_time_until_a_place_is_free_follows_the_pace(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("kvq_cli.server.places.time.monotonic", lambda: now[0])
    places = Places(1, 1)
    places.take(2, "n")

    def waits():
        with pytest.raises(ApiError) as caught:
            places.take(1, "n")
        return int(caught.value.headers["Retry-After"])

    assert waits() == 1
    now[0] = 107.5
    assert waits() == 8
    now[0] = 10_000.0
    assert waits() == LONGEST_WAIT


# ---- time ---------------------------------------------------------------------------------------


def test_an_answer_that_takes_too_long_ends_with_an_error():
    engine = slow_engine()
    with serving(engine, HttpOptions(request_timeout=0.3)) as url, client_of(url) as client:
        with pytest.raises(openai.InternalServerError, match=r"0\.3 s") as caught:
            client.completions.create(**BODY, max_tokens=900)
        assert (caught.value.status_code, caught.value.code) == (504, "timeout")
        stream = client.completions.create(**BODY, max_tokens=900, stream=True)
        with pytest.raises(openai.APIError, match=r"0\.3 s"):
            list(stream)
        wait_for(lambda: not engine.live)
        assert client.completions.create(**BODY, max_tokens=2).choices[0].text


def test_a_client_that_reads_nothing_ends_its_request_alone(monkeypatch):
    monkeypatch.setattr(streaming, "STALLED_SECONDS", 0.3)
    engine = ScriptedEngine(words=10**6, max_model_len=10**6)
    with serving(engine) as url, connected(url) as connection, client_of(url) as client:
        body = json.dumps({**BODY, "max_tokens": 900_000, "stream": True}).encode()
        connection.sendall(post(body, **{"Content-Length": len(body)}))
        wait_for(lambda: len(engine.live) == 1)
        assert client.completions.create(**BODY, max_tokens=3).choices[0].text
        wait_for(lambda: not engine.live)
        assert engine.submitted[0].cancelled


def test_what_a_slow_reader_has_not_read_comes_in_fewer_pieces(engine):
    """With the real handle: deltas that wait are joined, none is lost."""
    from kvq_cli.engine.async_engine import RequestHandle

    async def run():
        handle = RequestHandle(engine, "r", 1)
        for n in range(1000):
            handle._put(Delta(f"{n} ", (n,), "length" if n == 999 else None, 1))
        [delta] = [delta async for delta in handle]
        assert delta.text == "".join(f"{n} " for n in range(1000))
        assert delta.token_ids == tuple(range(1000))
        assert (delta.finish_reason, delta.cached_tokens) == ("length", 1)

    asyncio.run(run())


# ---- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("api_key", ""),
        ("api_key", "schlüssel"),
        ("api_key", "a\nb"),
        ("api_key", " s3cret"),
        ("max_queued_requests", -1),
        ("max_body_bytes", 0),
        ("request_timeout", 0.0),
        ("request_timeout", float("nan")),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=name):
        HttpOptions(**{name: value})
