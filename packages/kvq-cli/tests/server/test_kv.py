import threading

import httpx
import openai
import pytest
from http_server import wait_for
from scripted_engine import ATTENTION, MODEL

from kvq_cli.engine.params import RequestRejected
from kvq_pools import RebuildFailed, RebuildRejected


def rebuild(url, **body):
    return httpx.post(f"{url}/v1/kv/rebuild", json=body)


def error_of(answer, status, code):
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["code"] == code
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    return error["message"]


def test_the_status_has_size_price_pages_and_prefix_cache(url, client):
    found = httpx.get(f"{url}/v1/kv/status").json()
    assert (found["state"], found["failure"], found["model"]) == ("ready", None, MODEL)
    assert (found["page_tokens"], found["num_tokens"], found["max_model_len"]) == (16, 1600, 1000)
    assert (found["bytes_per_token"], found["bf16_bytes_per_token"]) == (9360, 23040)
    assert [tier["name"] for tier in found["tiers"]] == ["full", "window"]
    assert found["tiers"][0]["pages"] == {"total": 100, "free": 96, "cached": 4, "used": 0}
    assert found["tiers"][1]["window"] == 32
    assert found["tiers"][1]["stored"] == [
        {"name": "k", "codec": "q8_0", "layers": [1], "bytes": 1 << 19}
    ]
    assert found["prefix_cache"] == {
        "enabled": True,
        "lookups": 3,
        "queried_tokens": 30,
        "hit_tokens": 12,
        "evicted_pages": 6,
    }
    assert found["attention"] == ATTENTION
    assert found["attention_check"] == {
        "kernels": 7,
        "seconds": 0.25,
        "fallbacks": ["extend is computed by slow instead"],
    }
    assert found["extend_routes"] == {"triton: dense (cudnn)": 2048, "triton: loop": 3}
    assert found["prefill_reads"] == "own"
    assert found["requests"] == {"running": 0, "waiting": 0}
    assert found["last_rebuild"] is None


def test_a_rebuild_answers_with_before_after_kept_and_dropped(url, client, engine):
    answer = rebuild(url, num_tokens=800, kv_cache_dtype="q4_0")
    assert answer.status_code == 200
    found = answer.json()
    assert (found["before"]["num_tokens"], found["after"]["num_tokens"]) == (1600, 800)
    assert found["after"]["kv_cache_dtype"] == "q4_0"
    assert found["before"]["attention"] == found["after"]["attention"] == ATTENTION
    assert found["requests"] == {"kept": 2, "requeued": 1}
    assert found["cached_pages"] == {
        "kept": {"full": 5, "window": 0},
        "dropped": {"full": 3, "window": 2},
    }
    assert found["error"] is None
    assert engine.rebuilds == [(800, "q4_0")]
    # everything that tells of the cache follows
    status = httpx.get(f"{url}/v1/kv/status").json()
    assert status["last_rebuild"] == found
    assert status["num_tokens"] == 800
    assert client.models.list().data[0].max_model_len == 800
    with pytest.raises(openai.BadRequestError, match="800 tokens") as caught:
        client.completions.create(model=MODEL, prompt=[97] * 900, max_tokens=1)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "num_tokens", "kv_cache_dtype must be given"),
        ({"num_tokens": 0}, "num_tokens", "got 0"),
        ({"num_tokens": "200k"}, "num_tokens", "integer"),
        ({"num_tokens": 16.5}, "num_tokens", "integer"),
        ({"kv_cache_dtype": 4}, "kv_cache_dtype", "string"),
        ({"tokens": 16}, "tokens", "unknown parameter"),
    ],
)
def test_a_wrong_body_is_explained_and_nothing_is_tried(url, engine, body, param, words):
    answer = rebuild(url, **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert words in answer.json()["error"]["message"]
    assert engine.rebuilds == []


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RebuildRejected("9 bytes are missing"), 400, "rebuild_rejected"),
        (RebuildFailed("out of memory; the old cache serves on"), 500, "rebuild_failed"),
    ],
)
def test_a_rebuild_that_does_not_happen_says_why(url, client, engine, error, status, code):
    engine.rebuild_error = error
    assert error_of(rebuild(url, num_tokens=800), status, code) == str(error)
    assert client.completions.create(model=MODEL, prompt="a").choices[0].text


def test_a_second_rebuild_at_once_is_a_conflict(url, engine):
    engine.loop.call_soon_threadsafe(engine.rebuild_ends.clear)
    answers = []
    first = threading.Thread(target=lambda: answers.append(rebuild(url, num_tokens=800)))
    first.start()
    wait_for(lambda: engine.state == "rebuilding")
    error_of(rebuild(url, num_tokens=1600), 409, "rebuild_busy")
    assert httpx.get(f"{url}/v1/kv/status").json()["state"] == "rebuilding"
    assert httpx.get(f"{url}/health").status_code == 200
    engine.loop.call_soon_threadsafe(engine.rebuild_ends.set)
    first.join(10)
    assert answers[0].status_code == 200
    assert engine.rebuilds == [(800, None)]


def test_a_failed_engine_still_answers_its_status(url, engine):
    engine.fail("the pool has no memory")
    wait_for(lambda: engine.failure is not None)
    answer = httpx.get(f"{url}/v1/kv/status")
    assert answer.status_code == 200
    assert (answer.json()["state"], answer.json()["failure"]) == (
        "failed",
        "the pool has no memory",
    )


@pytest.mark.parametrize("stream", [False, True])
def test_usage_counts_cached_tokens_as_openai_does(client, stream):
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = client.completions.create(model=MODEL, prompt=[[97] * 10, [97] * 6], **options)
    usage = list(answer)[-1].usage if stream else answer.usage
    assert usage.prompt_tokens == 16
    assert usage.prompt_tokens_details.cached_tokens == 8


def test_a_request_that_a_rebuild_made_too_long_is_refused_like_any_other(url, client, engine):
    # submitted in time, refused by the worker: the handle raises
    submit = engine.submit_choices

    def too_late(prompt, params, count):
        [handle] = submit(prompt, params, count)
        handle._producer.cancel()
        engine.max_model_len = 5
        handle.finish(RequestRejected("10 prompt tokens exceed the cache of 5 tokens"))
        return [handle]

    engine.submit_choices = too_late
    with pytest.raises(openai.BadRequestError, match="cache of 5 tokens") as caught:
        client.completions.create(model=MODEL, prompt=[97] * 10)
    assert caught.value.code == "context_length_exceeded"
