"""A server over a scripted engine, and OpenAI's client of it."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from http_server import client_of, serving
from scripted_engine import ScriptedEngine


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def url(engine: ScriptedEngine) -> Iterator[str]:
    with serving(engine) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with client_of(url) as client:
        yield client
