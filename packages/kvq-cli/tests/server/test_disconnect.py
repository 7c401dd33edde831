import asyncio
import json
import socket
import threading

import httpx
import openai
import pytest
from http_server import wait_for
from scripted_engine import BREAKS, FAILS, GOES_WRONG, MODEL

from kvq_cli.server.app import create_app


@pytest.fixture
def engine(engine):
    engine.words, engine.pause = 10_000, 0.01
    return engine


def test_leaving_a_stream_cancels_all_its_choices(client, engine):
    stream = client.completions.create(
        model=MODEL, prompt=["a", "b", "c"], max_tokens=900, stream=True
    )
    next(iter(stream))
    assert len(engine.live) == 3
    stream.close()
    wait_for(lambda: not engine.live, 2)
    assert all(handle.cancelled for handle in engine.submitted)


def test_leaving_a_stream_that_is_silent_cancels_it(client, engine):
    # nothing is sent for a long time, so no write can find the client gone
    engine.pause = 60
    stream = client.completions.create(model=MODEL, prompt="a", stream=True)
    wait_for(lambda: len(engine.live) == 1)
    stream.close()
    wait_for(lambda: not engine.live, 2)


@pytest.mark.parametrize("version", ["2.0", "2.3", "2.4", "2.5"])
def test_leaving_a_stream_is_noticed_whatever_the_server_promises(engine, version):
    # servers differ: some raise when they send to nobody, this one does not
    body = json.dumps({"model": MODEL, "prompt": "a", "stream": True, "max_tokens": 900}).encode()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": version},
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }

    async def run():
        sent, left = [], asyncio.Event()
        messages = iter([{"type": "http.request", "body": body}])

        async def receive():
            for message in messages:
                return message
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)
            if len(sent) == 3:
                left.set()

        app = create_app(engine)
        async with app.router.lifespan_context(app), asyncio.timeout(5):
            await app(scope, receive, send)
            assert engine.submitted[0].cancelled
            assert len(sent) < 10

    asyncio.run(run())


def test_leaving_a_plain_request_cancels_all_its_choices(url, engine):
    body = {"model": MODEL, "prompt": ["a", "b"], "max_tokens": 900}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json=body, timeout=0.3)
    wait_for(lambda: not engine.live, 2)
    assert [handle.cancelled for handle in engine.submitted] == [True, True]


def test_one_client_leaving_disturbs_no_other(client, engine):
    engine.words = 60
    texts = []
    other = threading.Thread(
        target=lambda: texts.append(
            client.completions.create(model=MODEL, prompt="other", max_tokens=60).choices[0].text
        )
    )
    other.start()
    wait_for(lambda: len(engine.live) == 1)
    stream = client.completions.create(model=MODEL, prompt="a", max_tokens=60, stream=True)
    next(iter(stream))
    stream.close()
    other.join(10)
    assert texts == ["".join(f"6:{n} " for n in range(60))]


def test_a_client_that_leaves_while_it_still_sends_starts_nothing(url, engine):
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b'Content-Length: 100\r\n\r\n{"model": '
        )
    assert httpx.get(f"{url}/health").status_code == 200
    assert not engine.submitted


def test_one_choice_failing_cancels_the_others(client, engine):
    with pytest.raises(openai.InternalServerError, match="scripted failure") as caught:
        client.completions.create(model=MODEL, prompt=[[97], [97, FAILS], [98]], max_tokens=900)
    assert caught.value.status_code == 503
    assert caught.value.code == "engine_failed"
    assert [handle.cancelled for handle in engine.submitted] == [True, False, True]


def test_one_choice_refused_cancels_those_before_it(client, engine):
    with pytest.raises(openai.BadRequestError, match="1114112"):
        client.completions.create(model=MODEL, prompt=[[97], [0x110000]], max_tokens=900)
    assert [handle.cancelled for handle in engine.submitted] == [True]


@pytest.mark.parametrize(
    ("token", "message"),
    [(FAILS, "scripted failure"), (GOES_WRONG, "scripted mishap"), (BREAKS, "internal error")],
)
def test_an_error_within_a_stream_is_its_last_event(url, client, engine, token, message):
    stream = client.completions.create(
        model=MODEL, prompt=[[97], [token]], max_tokens=900, stream=True
    )
    with pytest.raises(openai.APIError, match=message):
        list(stream)
    wait_for(lambda: not engine.live, 2)
    body = {"model": MODEL, "prompt": [token], "stream": True}
    text = httpx.post(f"{url}/v1/completions", json=body).text
    assert '"error":' in text.split("\n\n")[-2]
    assert "[DONE]" not in text


def test_a_request_that_went_wrong_is_a_500_that_says_what(client, engine):
    engine.words = 5
    with pytest.raises(openai.InternalServerError, match="scripted mishap") as caught:
        client.completions.create(model=MODEL, prompt=[[97, GOES_WRONG]])
    assert (caught.value.status_code, caught.value.code) == (500, "request_failed")
    assert caught.value.body["type"] == "server_error"
    assert client.completions.create(model=MODEL, prompt="a").choices[0].text


def test_the_engine_dying_ends_every_request_with_503(url, client, engine):
    stream = client.completions.create(model=MODEL, prompt="a", max_tokens=900, stream=True)
    next(iter(stream))
    engine.fail("CUDA error")
    with pytest.raises(openai.APIError, match="CUDA error"):
        list(stream)
    with pytest.raises(openai.InternalServerError, match="CUDA error") as caught:
        client.completions.create(model=MODEL, prompt="a")
    assert caught.value.status_code == 503
