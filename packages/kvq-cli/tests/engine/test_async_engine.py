"""Commands that the worker answers: rebuilds that succeed, are refused, fail, and meet others."""

import asyncio
import threading

import pytest
from tiny_models import (
    generate,
    greedy,
    llama,
    make_async_engine,
    make_engine,
    random_prompt,
    tokens_of,
)

from kvq_cli.engine.params import EngineFailed, RebuildBusy, RequestRejected
from kvq_pools import RebuildFailed, RebuildRejected

PROMPT = random_prompt(20)


def with_engine(work, **options):
    """Run `work(async engine, engine)` on an event loop."""

    async def run():
        engine = make_engine(llama(), **options)
        served = make_async_engine(engine)
        served.start()
        try:
            async with asyncio.timeout(60):
                await work(served, engine)
        finally:
            await served.stop()

    asyncio.run(run())


async def collect(handle):
    return [delta async for delta in handle]


def break_allocations(engine, good=0, bad=1):
    """After `good` allocations, let `bad` of them fail."""
    pool, empty, count = engine.cache.pool, engine.cache.pool._empty, iter(range(10**6))

    def allocate(shape, kind):
        if good <= next(count) < good + bad:
            raise MemoryError("injected")
        return empty(shape, kind)

    pool._empty = allocate


async def hold(served, engine, num_tokens):
    """A rebuild that the worker has begun, and the event that lets it go on."""
    go, there = threading.Event(), threading.Event()
    rebuild = engine.rebuild

    def held(*arguments):
        there.set()
        assert go.wait(30)
        return rebuild(*arguments)

    engine.rebuild = held
    caller = asyncio.create_task(served.rebuild(num_tokens))
    await asyncio.to_thread(there.wait, 30)
    return caller, go


def test_streams_go_on_through_a_rebuild_and_the_summary_follows():
    want = generate(llama(), PROMPT, 40)

    async def work(served, engine):
        handles = [served.submit(PROMPT, greedy(40)) for _ in range(3)]
        streams = [asyncio.create_task(collect(handle)) for handle in handles]
        assert served.state == "ready"
        assert (served.summary.num_tokens, served.max_model_len) == (256, 256)
        report = await served.rebuild(120)
        assert report.after.num_tokens == 120
        assert (served.summary.num_tokens, served.max_model_len) == (120, 120)
        assert served.stats().last_rebuild == report
        assert served.stats().tiers[0].pages_total == 30
        for deltas in await asyncio.gather(*streams):
            assert tokens_of(deltas) == want
        report = await served.rebuild(cache_dtype="q4_0")
        assert served.summary.cache_dtype == "q4_0"
        assert served.summary.bytes_per_token == report.after.bytes_per_token
        with pytest.raises(RequestRejected, match="120"):
            served.submit(PROMPT * 8, greedy(1))

    with_engine(work)


def test_the_handle_knows_the_cached_tokens():
    async def work(served, engine):
        first = served.submit(PROMPT, greedy(5))
        await collect(first)
        again = served.submit(PROMPT, greedy(5))
        await collect(again)
        assert (first.cached_tokens, again.cached_tokens) == (0, 19)

    with_engine(work)


def test_only_one_rebuild_at_a_time():
    async def work(served, engine):
        first, go = await hold(served, engine, 400)
        assert served.state == "rebuilding"
        with pytest.raises(RebuildBusy):
            await served.rebuild(800)
        go.set()
        assert (await first).after.num_tokens == 400
        assert served.state == "ready"
        assert (await served.rebuild(800)).after.num_tokens == 800

    with_engine(work)


def test_a_rebuild_runs_to_its_end_when_its_caller_leaves():
    async def work(served, engine):
        caller, go = await hold(served, engine, 400)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert served.state == "rebuilding"
        go.set()
        while served.state != "ready":
            await asyncio.sleep(0.01)
        assert served.summary.num_tokens == 400

    with_engine(work)


def test_a_refused_and_a_failed_rebuild_leave_the_engine_serving():
    want = generate(llama(), PROMPT, 30)

    async def work(served, engine):
        stream = asyncio.create_task(collect(served.submit(PROMPT, greedy(30))))
        with pytest.raises(RebuildRejected, match="multiple"):
            await served.rebuild(401)
        break_allocations(engine, bad=1)
        with pytest.raises(RebuildFailed, match="injected"):
            await served.rebuild(400)
        assert served.healthy
        assert served.state == "ready"
        assert "injected" in served.stats().last_rebuild.error
        assert served.summary.num_tokens == 256
        assert tokens_of(await stream) == want

    with_engine(work)


def test_a_pool_that_fails_ends_streams_and_rebuild_with_the_reason():
    async def work(served, engine):
        streams = [asyncio.create_task(collect(served.submit(PROMPT, greedy(200))))] * 2
        await asyncio.sleep(0.05)
        break_allocations(engine, good=1, bad=100)
        with pytest.raises(EngineFailed, match="injected"):
            await served.rebuild(400)
        for stream in streams:
            with pytest.raises(EngineFailed, match="injected"):
                await stream
        assert (served.healthy, served.state) == (False, "failed")
        assert "injected" in served.failure
        with pytest.raises(EngineFailed, match="injected"):
            served.submit(PROMPT, greedy(1))
        with pytest.raises(EngineFailed, match="injected"):
            await served.rebuild(400)

    with_engine(work)


def test_a_request_that_no_longer_fits_when_its_turn_comes_is_refused_not_fatal():
    async def work(served, engine):
        rebuild, go = await hold(served, engine, 80)
        late = served.submit(PROMPT, greedy(100))  # fits what there was when it came
        small = served.submit(PROMPT, greedy(10))
        go.set()
        await rebuild
        with pytest.raises(RequestRejected, match="cache of 80 tokens"):
            await collect(late)
        assert len(tokens_of(await collect(small))) == 10
        assert served.healthy

    with_engine(work)


def test_a_stop_answers_a_rebuild_that_still_waits():
    async def work(served, engine):
        first, go = await hold(served, engine, 400)
        stop = asyncio.create_task(served.stop())
        await asyncio.sleep(0)
        go.set()
        await stop
        try:
            assert (await first).after.num_tokens == 400
        except EngineFailed as error:  # its answer came after the end
            assert "stopping" in str(error)
        with pytest.raises(EngineFailed):
            await served.rebuild(800)

    with_engine(work)


def test_requests_in_flight_hear_of_the_end_before_a_long_step_is_done():
    """And nobody need wait for that step, nor is anything taken in meanwhile."""
    go, there = threading.Event(), threading.Event()

    async def work(served, engine):
        step = engine.step

        def held():
            there.set()
            assert go.wait(30)
            return step()

        engine.step = held
        handle = served.submit(PROMPT, greedy(5))
        await asyncio.to_thread(there.wait, 10)
        async with asyncio.timeout(5):
            await served.stop(0.1)
            assert [delta.finish_reason for delta in await collect(handle)] == ["abort"]
        with pytest.raises(EngineFailed):
            served.submit(PROMPT, greedy(5))
        assert not served.healthy and not served._handles
        go.set()
        await asyncio.to_thread(served._thread.join, 30)

    with_engine(work)
