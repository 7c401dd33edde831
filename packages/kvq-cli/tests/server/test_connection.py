"""Clients that send no HTTP, or slowly, or never; and too many of them."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import httpx
import pytest
from fastapi import FastAPI, Response
from http_server import client_of, connected, serving, serving_app, wait_for
from scripted_engine import MODEL, ScriptedEngine

from kvq_cli.server import connection

BODY = {"model": MODEL, "prompt": "a"}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@contextmanager
def trickle(client: socket.socket, piece: bytes) -> Iterator[None]:
    """Sends the piece again and again, much faster than any limit on silence."""
    end = threading.Event()

    def send() -> None:
        while not end.wait(0.02):
            try:
                client.sendall(piece)
            except OSError:
                return

    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        end.set()
        sender.join()


def closed(client: socket.socket, seconds: float = 5.0) -> bytes:
    """What the server still said before it closed the connection, which it must in time."""
    client.settimeout(seconds)
    said = b""
    try:
        while got := client.recv(65536):
            said += got
    except ConnectionError:
        pass
    return said


# ---- slow ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (b"", None),  # says nothing
        (HEAD, None),  # and then no more
        (HEAD, b"X"),  # a head without end
        (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /he", b"a"),  # a second one
        (b"GET /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n"),
        (CHUNKED.replace(b"POST", b"PUT"), b"1\r\na\r\n"),  # a body after its answer, without end
    ],
)
def test_who_asks_nothing_is_left_and_others_hear_nothing_of_it(monkeypatch, first, then):
    monkeypatch.setattr(connection, "SILENT_SECONDS", 0.4)
    engine = ScriptedEngine(words=10_000, pause=0.01)
    with serving(engine) as url, client_of(url) as client:
        stream = client.completions.create(**BODY, max_tokens=120, stream=True)  # over a second
        next(iter(stream))
        start = time.monotonic()
        with connected(url) as slow:
            slow.sendall(first)
            with trickle(slow, then) if then else nullcontext():
                closed(slow, 2)
        assert 0.35 <= time.monotonic() - start < 1.9
        *_, last = stream
        assert last.choices[0].finish_reason == "length"


def test_a_request_that_is_answered_may_take_any_time(monkeypatch):
    monkeypatch.setattr(connection, "SILENT_SECONDS", 0.2)
    engine = ScriptedEngine(words=10_000, pause=0.01)
    with serving(engine) as url, httpx.Client(base_url=url) as client:
        for _ in range(2):  # the second on the same connection
            answer = client.post("/v1/completions", json={**BODY, "max_tokens": 60})
            assert answer.json()["usage"]["completion_tokens"] == 60


@pytest.fixture
def mebibytes() -> Iterator[str]:
    """A server whose answer is larger than what systems keep of it."""
    app = FastAPI()

    @app.get("/")
    async def large() -> Response:
        return Response(b"a" * (32 << 20))

    with serving_app(app) as url:
        yield url


def test_an_answer_that_nobody_reads_is_given_up(monkeypatch, mebibytes):
    monkeypatch.setattr(connection, "SILENT_SECONDS", 0.3)
    with connected(mebibytes) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        time.sleep(1.0)
        assert len(closed(client)) < 32 << 20


def test_an_answer_that_is_read_slowly_comes_whole(monkeypatch, mebibytes):
    monkeypatch.setattr(connection, "SILENT_SECONDS", 0.3)
    with connected(mebibytes) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        read, start = 0, time.monotonic()
        while got := client.recv(1 << 20):
            read += len(got)
            time.sleep(len(got) / (24 << 20))
        assert read > 32 << 20 and time.monotonic() - start > 1


# ---- not HTTP -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03hello\r\n\r\n",  # TLS
        b"GET /health HTTP/1.1\r\n\r\n",  # without Host
        HEAD + b"Content-Length: -5\r\n\r\n",
        HEAD + b"Content-Length: five\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
        HEAD + b"X: " + b"a" * 70_000,  # and on
        CHUNKED + b"zz\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_what_is_no_http_is_told_so_in_the_shape_of_all_errors(capfd, sent):
    with serving(ScriptedEngine()) as url, connected(url) as client:
        client.sendall(sent)
        head, _, body = closed(client).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        error = json.loads(body)["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert "HTTP/1.1" in error["message"]
        assert httpx.get(f"{url}/health").status_code == 200
    assert capfd.readouterr() == ("", "")


def test_nonsense_after_an_answer_ends_the_connection_without_a_word(capfd):
    with serving(ScriptedEngine()) as url, connected(url) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert b" 200 " in client.recv(1000)
        client.sendall(b"zz\r\n")
        assert b"HTTP" not in closed(client)
        assert httpx.get(f"{url}/health").status_code == 200
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
def test_who_offers_another_protocol_is_answered_in_http_and_no_log_grows(capfd, protocol):
    """Some clients offer HTTP/2 with every request."""
    headers = {"Connection": "Upgrade", "Upgrade": protocol}
    with serving(ScriptedEngine()) as url:
        answer = httpx.post(f"{url}/v1/completions", json=BODY, headers=headers)
        assert answer.json()["choices"]
    assert capfd.readouterr() == ("", "")


# ---- too many -----------------------------------------------------------------------------------


def test_of_too_many_connections_those_go_that_were_silent_the_longest(monkeypatch):
    monkeypatch.setattr(connection, "most_connections", lambda: 8)
    engine = ScriptedEngine(words=10_000, pause=0.01)
    with serving(engine) as url, client_of(url) as client, ExitStack() as stack:
        stream = client.completions.create(**BODY, max_tokens=900, stream=True)
        next(iter(stream))
        silent = [stack.enter_context(connected(url)) for _ in range(40)]
        assert httpx.get(f"{url}/health").status_code == 200
        assert all(closed(each) == b"" for each in silent[:30])
        silent[-1].sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in silent[-1].recv(1000)
        assert len(engine.live) == 1
        stream.close()


def test_connections_that_are_in_use_are_not_given_up_for_others(monkeypatch):
    monkeypatch.setattr(connection, "most_connections", lambda: 4)
    engine = ScriptedEngine(words=10_000, pause=0.01)
    with serving(engine) as url, ExitStack() as stack:
        body = json.dumps({**BODY, "max_tokens": 900, "stream": True}).encode()
        for _ in range(4):
            client = stack.enter_context(connected(url))
            client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        wait_for(lambda: len(engine.live) == 4)
        answer = httpx.get(f"{url}/health")
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "too_many_connections"
        assert len(engine.live) == 4


def test_what_a_process_may_open_is_not_all_for_connections():
    resource = pytest.importorskip("resource")
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert 16 <= connection.most_connections() <= max(16, files - connection.KEPT_FILES)


# ---- the end ------------------------------------------------------------------------------------


def test_a_body_that_is_not_here_yet_does_not_hold_up_the_end(capfd):
    with ExitStack() as stack:
        with serving(ScriptedEngine()) as url:
            client = stack.enter_context(connected(url))
            client.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
            time.sleep(0.2)
            start = time.monotonic()
        assert time.monotonic() - start < 3
    assert capfd.readouterr() == ("", "")
