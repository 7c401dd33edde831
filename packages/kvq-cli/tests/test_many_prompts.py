"""64 prompts of 5 to 2,000 tokens to real models and to each family: transformers' own tokens.

The cache is lossless and weights are float32. `nox -s "slow(kvq-cli)" -- -k smollm2` takes minutes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
from prose import token_prompt
from tiny_families import FAMILIES, tiny
from tiny_models import generate, greedy, make_engine, random_prompt, run, tokens_of

from kvq_cli.engine.engine import Engine

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

COUNT, SHORTEST, LONGEST = 64, 5, 2000
# as many between 5 and 50 as between 200 and 2,000
LENGTHS = [round(SHORTEST * (LONGEST / SHORTEST) ** (i / (COUNT - 1))) for i in range(COUNT)]
REAL = ("smollm2", "gemma")
PAGE_TOKENS, NEW_TOKENS, RUNNING = 16, 16, 16
# a step a token: so many tokens of prompts are computed that way
MOST_BY_ONE = 100


@dataclass(frozen=True)
class Case:
    """A model, its prompts, and what transformers generates."""

    model: Any
    tokenizer: Any
    prompts: dict[str, list[int]]
    want: dict[str, list[int]]

    def engine(self, chunk: int, num_pages: int = 4096) -> Engine:
        """One that computes prompts in chunks of that many tokens."""
        return make_engine(
            self.model,
            tokenizer=self.tokenizer,
            page_tokens=PAGE_TOKENS,
            num_pages=num_pages,
            max_prefill_tokens=chunk,
            max_running_requests=RUNNING,
        )


@pytest.fixture(scope="module", params=[*REAL, *FAMILIES])
def case(request):
    """Each real model, and a random one of each family."""
    if request.param in REAL:
        loaded = request.getfixturevalue(request.param)
        model, tokenizer = loaded.model, loaded.tokenizer
        prompts = [token_prompt(tokenizer, n, start=i) for i, n in enumerate(LENGTHS)]
    else:
        model, tokenizer = tiny(request.param, max_position_embeddings=LONGEST + 48), None
        prompts = [random_prompt(n, seed) for seed, n in enumerate(LENGTHS)]
    named = {f"{i}: {len(prompt)}": prompt for i, prompt in enumerate(prompts)}
    want = {name: generate(model, prompt, NEW_TOKENS) for name, prompt in named.items()}
    assert len({tuple(tokens) for tokens in want.values()}) > COUNT // 2
    return Case(model, tokenizer, named, want)


def differing(case: Case, got: dict[str, list[int]]) -> dict[str, tuple[list[int], list[int]]]:
    """The prompts whose tokens are others, with both."""
    return {n: (tokens, case.want[n]) for n, tokens in got.items() if tokens != case.want[n]}


def test_there_are_64_from_5_to_2000_tokens():
    assert (len(LENGTHS), LENGTHS[0], LENGTHS[-1]) == (64, 5, 2000)


@pytest.mark.parametrize("chunk", [1, 16, 17, 512])
def test_batched_in_chunks(case, chunk):
    most = MOST_BY_ONE if chunk == 1 else LONGEST
    asked = {name: p for name, p in case.prompts.items() if len(p) <= most}
    got = run(case.engine(chunk), {n: (p, greedy(NEW_TOKENS)) for n, p in asked.items()})
    assert not differing(case, {name: tokens_of(deltas) for name, deltas in got.items()})


def test_alone_and_from_the_prefix_cache(case):
    engine = case.engine(512)
    cold: dict[str, list[int]] = {}
    again: dict[str, list[int]] = {}
    cached = {}
    for name, prompt in case.prompts.items():
        for found in (cold, again):
            deltas = run(engine, {name: (prompt, greedy(NEW_TOKENS))})[name]
            found[name] = tokens_of(deltas)
        cached[name] = deltas[-1].cached_tokens
    assert not differing(case, cold)
    assert not differing(case, again)
    # states are kept at the ends of pages, and where an answer ended, which is too far
    grain = PAGE_TOKENS if engine.cache.space.num_snapshots else 1
    whole = {name: (len(prompt) - 1) // grain * grain for name, prompt in case.prompts.items()}
    assert cached == whole


def test_preempted_and_rebuilt(case):
    pages = (LONGEST + NEW_TOKENS) // PAGE_TOKENS  # the longest fills them all
    engine = case.engine(512, num_pages=pages)
    got: dict[str, list[int]] = {name: [] for name in case.prompts}
    mixed = list(case.prompts)
    random.Random(0).shuffle(mixed)  # short ones fill what long ones leave, and all of them grow
    for name in mixed:
        engine.add(name, case.prompts[name], greedy(NEW_TOKENS))
    steps, requeued = 0, 0
    while engine.has_work:
        steps += 1
        if steps % 5 == 0:
            size = pages * (1 + (steps % 10 == 0))
            requeued += engine.rebuild(num_tokens=PAGE_TOKENS * size).requests_requeued
        for name, delta in engine.step():
            got[name] += delta.token_ids
        engine.cache.space.check_integrity()
    assert not differing(case, got)
    preempted = engine.stats().preemptions_total - requeued
    if engine.runner.geometry.full_layers:
        assert preempted > 0
        assert requeued > COUNT // 4
    else:  # the windows of all that run have pages of their own, in a smaller cache, too
        assert (preempted, requeued) == (0, 0)
