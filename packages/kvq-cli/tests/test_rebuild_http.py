"""A live server: eight openai clients stream while the cache changes under them."""

import threading

import httpx
import openai
import pytest
from http_server import client_of, serving, wait_for
from tiny_models import (
    gemma,
    generate,
    llama,
    make_async_engine,
    make_engine,
    random_prompt,
)

from kvq_cli.config import build_plan, geometry, parse_cache_dtype

PROMPTS = [random_prompt(20 + 3 * n, n) for n in range(8)]
NEW = 60


class Streams:
    """Eight clients, a thread each, that read to the end."""

    def __init__(self, url):
        self.texts = ["" for _ in PROMPTS]
        self.errors = [None for _ in PROMPTS]
        self._url = url
        self._threads = [threading.Thread(target=self._read, args=(n,)) for n in range(8)]
        for thread in self._threads:
            thread.start()

    def _read(self, n):
        with client_of(self._url) as client:
            try:
                stream = client.completions.create(
                    model="tiny",
                    prompt=PROMPTS[n],
                    max_tokens=NEW,
                    temperature=0,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                for chunk in stream:
                    self.texts[n] += chunk.choices[0].text
            except openai.APIError as error:
                self.errors[n] = error

    def have(self, characters):
        return all(len(text) >= characters for text in self.texts)

    def join(self):
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


def text_of(tokens):
    return "".join(chr(32 + t) for t in tokens)


def rebuild(url, **body):
    return httpx.post(f"{url}/v1/kv/rebuild", json=body, timeout=60)


def status(url):
    return httpx.get(f"{url}/v1/kv/status").json()


@pytest.mark.parametrize("make", [llama, gemma])
def test_eight_clients_read_the_same_text_whatever_the_caches_size(make):
    model = make()
    want = [text_of(generate(model, prompt, NEW)) for prompt in PROMPTS]
    engine = make_engine(model, num_pages=200)
    with serving(make_async_engine(engine)) as url:
        streams = Streams(url)
        wait_for(lambda: streams.have(3), 30)
        for num_tokens in (2000, 120, 600):  # 120: room for two of the eight
            answer = rebuild(url, num_tokens=num_tokens)
            assert answer.status_code == 200, answer.text
            assert answer.json()["after"]["num_tokens"] == num_tokens
            assert (answer.json()["requests"]["requeued"] > 0) == (num_tokens == 120)
        streams.join()
        assert streams.errors == [None] * 8
        assert streams.texts == want
        found = status(url)
        assert found["num_tokens"] == 600
        assert found["requests"] == {"running": 0, "waiting": 0}
        assert all(tier["pages"]["used"] == 0 for tier in found["tiers"])


@pytest.mark.parametrize("make", [llama, gemma])
def test_p100_the_status_is_the_planners_arithmetic_before_and_after(make):
    model = make()
    with serving(make_async_engine(make_engine(model, cache="q8_0", num_pages=50))) as url:
        for pages, dtype in ((50, "q8_0"), (120, "k=q8_0,v=q4_0")):
            if pages != 50:
                answer = rebuild(url, num_tokens=pages * 4, kv_cache_dtype=dtype)
                assert answer.status_code == 200, answer.text
            plan = build_plan(
                geometry(model.config.to_dict()),
                parse_cache_dtype(dtype),
                page_tokens=4,
                max_running_requests=8,
                max_prefill_tokens=16,
            )
            found = status(url)
            assert found["kv_cache_dtype"] == dtype
            assert found["bytes_per_token"] == plan.token_bytes
            assert found["bytes"] == plan.nbytes(pages)
            assert sum(tier["bytes"] for tier in found["tiers"]) == plan.nbytes(pages)
            for tier in found["tiers"]:
                assert tier["pages"]["total"] == plan.tier(tier["name"]).pages(pages)
                assert tier["bytes"] == plan.tier_bytes(tier["name"], pages)


def test_a_failed_rebuild_is_told_and_the_streams_never_notice():
    model = llama()
    want = [text_of(generate(model, prompt, NEW)) for prompt in PROMPTS]
    engine = make_engine(model, num_pages=200)
    pool, empty = engine.cache.pool, engine.cache.pool._empty
    with serving(make_async_engine(engine)) as url:
        streams = Streams(url)
        wait_for(lambda: streams.have(3), 30)
        for broken in range(2):
            calls = iter(range(100))

            def allocate(shape, kind, broken=broken, calls=calls):
                if next(calls) == broken:
                    raise MemoryError("injected")
                return empty(shape, kind)

            pool._empty = allocate
            answer = rebuild(url, num_tokens=4000)
            assert answer.status_code == 500
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("server_error", "rebuild_failed")
            assert "injected" in error["message"]
        assert "injected" in status(url)["last_rebuild"]["error"]
        assert httpx.get(f"{url}/health").status_code == 200
        streams.join()
        assert streams.texts == want


def test_a_pool_that_cannot_come_back_ends_every_stream_with_the_reason():
    engine = make_engine(llama(), num_pages=200)
    pool, empty = engine.cache.pool, engine.cache.pool._empty
    with serving(make_async_engine(engine)) as url:
        streams = Streams(url)
        wait_for(lambda: streams.have(3), 30)
        calls = iter(range(100))

        def allocate(shape, kind):
            if next(calls) >= 1:
                raise MemoryError("injected")
            return empty(shape, kind)

        pool._empty = allocate
        answer = rebuild(url, num_tokens=4000)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_failed"
        streams.join()
        assert all("injected" in str(error) for error in streams.errors)
        health = httpx.get(f"{url}/health")
        assert health.status_code == 503
        assert "injected" in health.json()["error"]["message"]
        found = status(url)
        assert found["state"] == "failed"
        assert "injected" in found["failure"]
        with client_of(url) as client, pytest.raises(openai.InternalServerError, match="injected"):
            client.completions.create(model="tiny", prompt=PROMPTS[0])
        assert rebuild(url, num_tokens=4000).status_code == 503


def test_usage_and_metrics_tell_of_a_shared_prefix():
    with serving(make_async_engine(make_engine(llama()))) as url, client_of(url) as client:
        usages = [
            client.completions.create(
                model="tiny", prompt=PROMPTS[0] + tail, max_tokens=2, temperature=0
            ).usage
            for tail in ([5, 6, 7], [8, 9])
        ]
        assert [u.prompt_tokens_details.cached_tokens for u in usages] == [0, 20]
        text = httpx.get(f"{url}/metrics").text
        assert "kvq_prefix_cache_queries_total 45.0" in text
        assert "kvq_prefix_cache_hits_total 20.0" in text
        assert 'kvq_pages{state="used",tier="full"} 0.0' in text
