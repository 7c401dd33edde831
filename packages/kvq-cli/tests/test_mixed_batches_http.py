"""A live server: a long prompt is read in chunks while others' answers are written."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from http_server import client_of, serving, wait_for
from tiny_models import gemma, llama, make_async_engine, make_engine, random_prompt

import kvq_codecs
from kvq_attention import launches

SHORT = [random_prompt(12 + 5 * n, n) for n in range(3)]
LONG = random_prompt(150)
CHUNK = 16
NEW = 100
FORMATS = [*kvq_codecs.names(), "k=q8_0,v=q4_0"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def answer(
    url: str, prompt: list[int], max_tokens: int, heard: list[str] | None = None
) -> tuple[str, int]:
    """The whole text and its tokens; `heard` grows while it comes."""
    heard, tokens = [] if heard is None else heard, 0
    with client_of(url) as client:
        stream = client.completions.create(
            model="tiny",
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        for chunk in stream:
            heard.extend(choice.text for choice in chunk.choices)
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
    return "".join(heard), tokens


def record_steps(engine: Any) -> list[tuple[int, int]]:
    """A list that grows by each step's decodes and extends."""
    seen: list[tuple[int, int]] = []
    forward = engine.runner.forward

    def recorded(step: Any) -> torch.Tensor:
        seen.append((len(step.decodes), len(step.extends)))
        logits: torch.Tensor = forward(step)
        assert logits.isfinite().all()
        return logits

    engine.runner.forward = recorded
    return seen


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("make", "cache", "reads"),
    [
        *((llama, cache, "own") for cache in FORMATS),
        (gemma, "k=q8_0,v=q4_0", "own"),
        (llama, "q4_0", "packed"),
    ],
)
def test_p026_a_long_prefill_that_arrives_during_decodes_changes_no_answer(
    make: Any, cache: str, reads: str, device: str
) -> None:
    model = make(head_dim=128).to(device)
    # In float64 rounding decides nothing, whatever is computed in one product. Kernels have none:
    # what is packed of their float32 may lie at an edge, and the answer goes another way.
    exact = device == "cpu" or cache == "fp32"
    if device == "cpu":
        model = model.double()
    engine = make_engine(
        model,
        cache=cache,
        page_tokens=16,
        num_pages=60,
        max_prefill_tokens=CHUNK,
        cache_type="none",
        prefill_reads=reads,
    )
    steps = record_steps(engine)
    with serving(make_async_engine(engine)) as url, ThreadPoolExecutor(4) as others:
        alone = [*(answer(url, prompt, NEW) for prompt in SHORT), answer(url, LONG, 5)]
        assert not any(decodes and extends for decodes, extends in steps)
        heard: list[list[str]] = [[] for _ in SHORT]
        with launches.counting() as counted:
            written = []
            for prompt, own in zip(SHORT, heard, strict=True):
                written.append(others.submit(answer, url, prompt, NEW, own))
                wait_for(lambda own=own: own, 60)  # two prompts in one step would be cut otherwise
            long = answer(url, LONG, 5)
            together = [*(each.result(60) for each in written), long]
    if exact:
        assert together == alone
    assert [tokens for _, tokens in together] == [NEW, NEW, NEW, 5]
    whole_chunks = len(LONG) // CHUNK
    assert steps.count((3, 1)) >= whole_chunks, "decodes and the long prefill shared their steps"
    backends = engine.cache.choice.backends
    op = "extend" if reads == "own" else "decode"
    assert counted[backends.extend][op] >= whole_chunks
