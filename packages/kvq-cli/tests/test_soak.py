"""Random requests over HTTP for long: streams, plain ones, choices, refusals, clients that leave.

Nothing of them may stay: no page, no place, no object, no memory.
"""

from __future__ import annotations

import asyncio
import gc
import random
from typing import Any

import httpx
import psutil
import pytest
from http_server import serving, wait_for
from own_process import own_bytes
from tiny_models import llama, make_async_engine, make_engine, random_prompt

from kvq_cli.engine.async_engine import RequestHandle
from kvq_cli.engine.engine import Engine
from kvq_cli.engine.request import Request
from kvq_cli.server.generation import Generation
from kvq_cli.server.limits import HttpOptions

STEMS = [random_prompt(40, seed) for seed in range(3)]
CLIENTS, ROUND = 24, 48
LEFT = 0  # what a request's outcome is called when its client left


def some_body(rng: random.Random) -> dict[str, Any]:
    """A request of any kind; one in ten is wrong."""
    prompt = rng.choice(STEMS)[: rng.randrange(41)] + random_prompt(1 + rng.randrange(12))
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": prompt if rng.random() < 0.8 else [prompt, prompt[::-1]],
        "max_tokens": 1 + rng.randrange(8),
        "stream": rng.random() < 0.6,
    }
    extras = {
        "temperature": rng.choice([0, 0.7, 1.5]),
        "top_p": rng.uniform(0.1, 1),
        "top_k": rng.randrange(100),
        "min_p": rng.random(),
        "seed": rng.randrange(100),
        "n": 1 + rng.randrange(3),
        "logprobs": rng.randrange(6),
        "stop": [chr(33 + rng.randrange(90)) for _ in range(2)],
        "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-2, 2),
        "repetition_penalty": rng.uniform(0.5, 2),
        "ignore_eos": True,
    }
    body |= {name: value for name, value in extras.items() if rng.random() < 0.3}
    wrong = {"temperature": -1, "model": "other", "max_tokens": 10_000, "prompt": [[1], []]}
    if rng.random() < 0.1:
        body |= [dict([pair]) for pair in wrong.items()][rng.randrange(len(wrong))]
    return body


async def ask(client: httpx.AsyncClient, rng: random.Random) -> int:
    """Send one request, leaving before its end in a third of the cases; its status or `LEFT`."""
    body, patience = some_body(rng), rng.choice([None, None, rng.uniform(0, 0.1)])
    try:
        async with (
            asyncio.timeout(patience),
            client.stream("POST", "/v1/completions", json=body) as answer,
        ):
            async for _ in answer.aiter_bytes():
                pass
            return answer.status_code
    except TimeoutError:
        return LEFT


def left_over() -> int:
    """How many objects of requests are alive."""
    gc.collect()
    return sum(type(each) in (Request, RequestHandle, Generation) for each in gc.get_objects())


def soak(engine: Engine, count: int, seed: int) -> list[int]:
    """Outcomes of `count` requests; everything is at rest and whole after every round."""
    served = make_async_engine(engine)
    options = HttpOptions(max_queued_requests=20)
    before = left_over()  # of other tests
    outcomes: list[int] = []
    resident: list[int] = []

    def at_rest() -> None:
        wait_for(lambda: not engine.has_work)
        wait_for(lambda: not served._handles)
        engine.cache.space.check_integrity()
        assert not any(tier.pages_used for tier in served.stats().tiers)
        wait_for(lambda: left_over() <= before)
        resident.append(own_bytes(psutil.Process()))

    async def part(url: str, number: int) -> None:
        limits = httpx.Limits(max_connections=CLIENTS)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:

            async def worker(n: int) -> None:
                rng = random.Random(f"{seed} {number} {n}")
                for _ in range(ROUND // CLIENTS):
                    outcomes.append(await ask(client, rng))

            await asyncio.gather(*map(worker, range(CLIENTS)))

    with serving(served, options) as url:
        for number in range(count // ROUND):
            asyncio.run(part(url, number))
            at_rest()
    third = len(resident) // 3
    grown = max(resident[-third:]) - max(resident[:third])
    assert grown < 24 << 20, f"{grown:,} bytes more in the last third than in the first"
    return outcomes


@pytest.mark.usefixtures("one_thread")
def test_nothing_stays_of_hundreds_of_requests() -> None:
    engine = make_engine(
        llama(), attention_backend="reference", num_pages=24, max_running_requests=6
    )
    outcomes = soak(engine, 384, seed=0)
    assert len(outcomes) == 384
    # of every kind some: answered, refused for what they were, for the flood, and left
    assert {LEFT, 200, 400, 404, 429} == set(outcomes)
    assert outcomes.count(200) > 100
    stats = engine.stats()
    assert stats.preemptions_total and stats.prefix.hit_tokens


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("cache", ["fp32", "k=q8_0,v=q4_0"])
def test_nothing_stays_of_ten_thousand_requests(cache: str) -> None:
    engine = make_engine(
        llama(), attention_backend="reference", num_pages=24, max_running_requests=6, cache=cache
    )
    outcomes = soak(engine, 10_080, seed=1)
    assert {LEFT, 200, 400, 404, 429} == set(outcomes)
    assert outcomes.count(200) > 3000
