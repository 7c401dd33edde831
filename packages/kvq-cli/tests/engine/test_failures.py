"""What goes wrong while a step is computed ends whose fault it was, and nobody else."""

import asyncio
import gc
import weakref

import pytest
import torch
from tiny_models import (
    generate,
    greedy,
    llama,
    make_async_engine,
    make_engine,
    random_prompt,
    tokens_of,
)

from kvq_cli.engine.params import EngineFailed, RequestFailed

pytestmark = pytest.mark.usefixtures("one_thread")

GOOD, BAD = random_prompt(9), random_prompt(11)
WANT = 12


def fail_on(engine, prompt, how):
    """Let every forward that `prompt` takes part in go wrong once it has said 3 tokens."""
    forward = engine.runner.forward

    def broken(step):
        logits = forward(step)
        for row, (request, _) in enumerate(step.work):
            if request.tokens[: len(prompt)] == prompt and request.completion_tokens == 3:
                logits = how(logits, row)
        return logits

    engine.runner.forward = broken


def raises(logits, row):
    raise RuntimeError("injected")


def runs_out_of_memory(logits, row):
    raise torch.OutOfMemoryError("injected")


def is_no_number(logits, row):
    return logits.index_fill(0, torch.tensor([row]), torch.nan)


def finish(engine, names):
    out = {name: [] for name in names}
    while engine.has_work:
        for name, delta in engine.step():
            out[name].append(delta)
        engine.cache.space.check_integrity()
    return out


@pytest.mark.parametrize("how", [raises, runs_out_of_memory, is_no_number])
def test_a_request_that_fails_in_a_step_fails_alone(how):
    engine = make_engine(llama(), attention_backend="reference")
    fail_on(engine, BAD, how)
    for name, prompt in {"a": GOOD, "bad": BAD, "b": GOOD[::-1]}.items():
        engine.add(name, prompt, greedy(WANT))
    out = finish(engine, ["a", "bad", "b"])
    assert tokens_of(out["a"]) == generate(llama(), GOOD, WANT)
    assert tokens_of(out["b"]) == generate(llama(), GOOD[::-1], WANT)
    assert tokens_of(out["bad"]) == generate(llama(), BAD, 3)
    last = out["bad"][-1]
    assert last.finish_reason == "error"
    assert ("not finite" if how is is_no_number else "injected") in last.error
    assert engine.stats().requests_finished_total == {"length": 2, "error": 1}
    assert not any(tier.pages_used for tier in engine.stats().tiers)


def test_what_a_failed_request_left_in_the_prefix_cache_is_right():
    engine = make_engine(llama(), attention_backend="reference")
    fail_on(engine, BAD, raises)
    engine.add("bad", BAD, greedy(WANT))
    finish(engine, ["bad"])
    engine.add("again", [*BAD, 5], greedy(WANT))  # other tokens, the same beginning
    fail_on(engine, [], lambda logits, row: logits)
    [*deltas] = finish(engine, ["again"])["again"]
    assert deltas[0].cached_tokens == len(BAD)


def test_a_prompt_that_fails_fails_for_all_its_choices():
    engine = make_engine(llama(), attention_backend="reference")

    def broken(step):
        raise RuntimeError("injected")

    engine.runner.forward = broken
    engine.add("a", GOOD, greedy(WANT), ["b", "c"])
    out = finish(engine, ["a", "b", "c"])
    assert [[d.finish_reason for d in deltas] for deltas in out.values()] == [["error"]] * 3


def test_what_a_step_had_is_free_before_it_is_tried_again():
    """Its graphs and activations: of a step that took all memory the others would fail, too."""
    engine = make_engine(llama(), attention_backend="reference")
    held, alive = [], []
    forward, recover = engine.runner.forward, engine.runner.recover

    class Activations:
        """What a frame holds."""

    def deep(step, depth=3):
        activations = Activations()
        held.append(weakref.ref(activations))
        if depth:
            return deep(step, depth - 1)
        try:
            raise RuntimeError("out of memory")
        except RuntimeError as error:
            raise ValueError("as it was told of") from error

    def short(step):
        return deep(step) if len(step.work) > 1 else forward(step)

    def noted():
        alive.extend(ref() is not None for ref in held)
        recover()

    engine.runner.forward, engine.runner.recover = short, noted
    gc.disable()
    try:
        for name in ("a", "b"):
            engine.add(name, GOOD, greedy(WANT))
        out = finish(engine, ["a", "b"])
    finally:
        gc.enable()
    assert [deltas[-1].finish_reason for deltas in out.values()] == ["length"] * 2
    assert len(alive) >= 4 and not any(alive)


def test_a_broken_device_ends_the_engine():
    engine = make_engine(llama(), attention_backend="reference")

    def broken(*_):
        raise RuntimeError("an illegal memory access was encountered")

    engine.runner.forward = engine.runner.recover = broken
    engine.add("a", GOOD, greedy(WANT))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.step()


def test_behind_an_event_loop_one_handle_raises_and_the_engine_serves_on():
    async def work():
        engine = make_engine(llama(), attention_backend="reference")
        fail_on(engine, BAD, raises)
        served = make_async_engine(engine)
        served.start()
        try:
            good, bad = served.submit(GOOD, greedy(WANT)), served.submit(BAD, greedy(WANT))
            with pytest.raises(RequestFailed, match="RuntimeError: injected"):
                [delta async for delta in bad]
            want = generate(llama(), GOOD, WANT)
            assert tokens_of([delta async for delta in good]) == want
            assert served.healthy
            again = served.submit(GOOD, greedy(WANT))
            assert tokens_of([delta async for delta in again]) == want
        finally:
            await served.stop()
        with pytest.raises(EngineFailed):
            served.submit(GOOD, greedy(1))

    asyncio.run(work())
