"""The server's own OpenAPI document, and requests made from it: none may be the server's fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest
import schemathesis
from http_server import serving
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import status_code_conformance
from tiny_models import VOCABULARY, llama, make_async_engine, make_engine

pytestmark = pytest.mark.usefixtures("one_thread")

OPERATIONS = [
    "GET /health",
    "GET /metrics",
    "GET /ready",
    "GET /v1/kv/status",
    "GET /v1/models",
    "GET /v1/models/{name}",
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/kv/rebuild",
]
FORMATS = ["fp32", "bf16", "q8_0", "k=q8_0,v=q4_0"]


class Anything:
    """A tokenizer that has a token for every character, and a template for every conversation."""

    chat_template = "there is one"

    def encode(self, text: str, **_: Any) -> list[int]:
        return [1 + ord(c) % (VOCABULARY - 1) for c in text]

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return "".join(chr(32 + t) for t in tokens)

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return "".join(f"{message['role']}:{message['content']}" for message in messages)


@pytest.fixture(scope="module")
def schema() -> Iterator[Any]:
    engine = make_engine(
        llama(),
        attention_backend="reference",
        max_model_len=48,
        tokenizer=Anything(),
    )
    with serving(make_async_engine(engine)) as url:
        yield schemathesis.openapi.from_url(f"{url}/openapi.json")
        # whatever was asked, it still answers
        body = {"model": "tiny", "prompt": [5], "max_tokens": 3, "ignore_eos": True}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
        assert not any(tier.pages_used for tier in engine.stats().tiers)
        engine.cache.space.check_integrity()


def test_every_operation_is_tried(schema: Any) -> None:
    found = [result.ok().label for result in schema.get_all_operations()]
    assert sorted(found) == OPERATIONS


def make_likely(body: dict[str, Any]) -> None:
    """Put in what the document cannot know, so that more is tried than its refusal."""
    if "model" in body:
        body["model"] = "tiny"
    if body.get("n") in range(4, 129):
        body["n"] = 3  # to save time
    if type(tokens := body.get("num_tokens")) is int and tokens > 0:
        body["num_tokens"] = 4 * (tokens % 100)
    if isinstance(name := body.get("kv_cache_dtype"), str):
        likely = [*FORMATS, name]
        body["kv_cache_dtype"] = likely[len(name) % len(likely)]


@pytest.mark.parametrize("label", OPERATIONS)
def test_no_request_made_from_the_document_is_the_servers_fault(schema: Any, label: str) -> None:
    [operation] = [r.ok() for r in schema.get_all_operations() if r.ok().label == label]
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=40 if label.startswith("POST") else 10,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def run(case: Any) -> None:
        if isinstance(case.body, dict):
            make_likely(case.body)
        answer = case.call()
        statuses[answer.status_code] += 1
        case.validate_response(answer, checks=[not_a_server_error, status_code_conformance])

    run()
    assert statuses[200] or label == "GET /v1/models/{name}", statuses
