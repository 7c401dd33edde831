"""An application served for real: uvicorn on a free port, in a thread."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import openai
import uvicorn
from fastapi import FastAPI

from kvq_cli.server.app import create_app
from kvq_cli.server.limits import HttpOptions
from kvq_cli.server.run import configured


@contextmanager
def serving(engine: Any, options: HttpOptions | None = None) -> Iterator[str]:
    """The URL of a server over `engine`."""
    with serving_app(create_app(engine, options)) as url:
        yield url


@contextmanager
def serving_app(app: FastAPI) -> Iterator[str]:
    """The URL of a server of `app`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(configured(app))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_for(lambda: server.started)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


@contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    """A connection to a server, for what no HTTP client would send."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        yield connection


@contextmanager
def client_of(url: str, api_key: str = "none") -> Iterator[openai.OpenAI]:
    """OpenAI's own client of a server; it never tries twice."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0) as client:
        yield client


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait until the condition holds; fail when it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.005)
