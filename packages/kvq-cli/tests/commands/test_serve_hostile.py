"""`kvq serve` as a process, and clients that mean no good."""

import shutil
import signal
import socket
import time
from contextlib import ExitStack

import httpx
import pytest
from http_server import client_of, connected

from kvq_cli.server import run


@pytest.mark.parametrize("signal_sent", [signal.SIGTERM, signal.SIGINT])
def test_clients_that_stand_still_do_not_hold_up_the_end_nor_fill_the_log(start, signal_sent):
    process = start("hasty")
    body = b'{"model": "it\'s a model", "prompt": "a", "max_tokens": 900, "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    whole = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with ExitStack() as stack:
        for sent in (
            b"",
            head,
            head + b"Content-Length: 100\r\n\r\n{",  # a body that never comes
            head + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
            whole,  # a stream that is not read
            whole.replace(b"true", b"false"),  # an answer that is not there yet
            b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",  # a connection kept open
        ):
            client = stack.enter_context(connected(process.url))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            client.sendall(sent)
        time.sleep(0.5)
        process.process.send_signal(signal_sent)
        begun = time.monotonic()
        assert process.end() == (0 if signal_sent == signal.SIGINT else -signal.SIGTERM)
        assert time.monotonic() - begun < 8  # its patience and the time to linger
    after = process.said.partition("curl ")[2].splitlines()[1:]
    assert after == (["stopped"] if signal_sent == signal.SIGINT else [])


def test_all_that_the_end_waits_for_takes_less_than_half_a_minute():
    assert run.DRAIN_SECONDS + run.STEP_SECONDS + run.LINGER_SECONDS < 30


@pytest.mark.skipif(not shutil.which("prlimit"), reason="prlimit is not installed")
def test_more_clients_than_files_that_may_be_open_neither_lock_others_out_nor_fill_the_log(start):
    process = start("demo", prefix=("prlimit", "--nofile=256"))
    with client_of(process.url) as client, ExitStack() as stack:
        stream = client.completions.create(
            model="it's a model", prompt="a", max_tokens=300, stream=True
        )
        next(iter(stream))
        for _ in range(600):
            stack.enter_context(connected(process.url))
        assert httpx.get(f"{process.url}/health", timeout=10).status_code == 200
        *_, last = stream
        assert last.choices[0].finish_reason == "length"
    assert process.interrupt() == 0
    assert process.said.partition("curl ")[2].splitlines()[1:] == ["stopped"]
