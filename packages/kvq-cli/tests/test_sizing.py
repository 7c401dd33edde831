"""Pages and workspace of a budget, against trying every context; and what serve refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from geometries import shape
from published import CONFIGS

from kvq_cli import compose, sizing
from kvq_cli.compose import ServeOptions, build_engine
from kvq_cli.config import CacheFormat, ConfigError, ModelGeometry, build_plan, geometry
from kvq_cli.models.loader import LoadedModel
from kvq_cli.models.source import ModelSource
from kvq_cli.sizing import Limits, Sizing
from kvq_pools import Budget, BudgetError, Pool, PoolPlan

FULL = shape(num_layers=2, max_position=400)
HALF = shape(num_layers=4, max_position=400, windows=(None, 24) * 2)
SLIDING = shape(num_layers=2, max_position=400, windows=(24, 24))


def limits_of(model: ModelGeometry, **changes: Any) -> Limits:
    base = Limits(model.max_position, 8, 3, 16, on_host=True)
    return replace(base, **changes)


def plan_of(model: ModelGeometry, limits: Limits, codec: str = "q8_0") -> PoolPlan:
    return build_plan(
        model,
        CacheFormat(codec, codec),
        page_tokens=limits.page_tokens,
        max_running_requests=limits.max_running_requests,
        max_prefill_tokens=limits.max_prefill_tokens,
    )


def tried(model: ModelGeometry, plan: PoolPlan, limits: Limits, budget: Budget) -> Sizing | None:
    """The longest context that fits beside its own workspace, found by trying each."""
    step = limits.page_tokens
    contexts = [n for n in range(step, limits.context, step)] + [limits.context]
    best = None
    for context in contexts:
        needed = limits.needs(model, context)
        try:
            pages = replace(budget, workspace_bytes=needed).pages(plan)
        except BudgetError:
            continue
        if limits.request_pages(model, context) <= pages:
            best = Sizing(pages, context, needed)
    return best


@pytest.mark.parametrize("model", [FULL, HALF, SLIDING], ids=["full", "half", "sliding"])
def test_the_longest_context_that_fits_is_found(model):
    limits = limits_of(model)
    plan = plan_of(model, limits)
    least = limits.needs(model, limits.page_tokens) + plan.nbytes(2)
    outcomes = set()
    for extra in range(-40_000, 6_000_000, 37_111):
        budget = Budget(least + extra, least + extra, 1.0)
        expected = tried(model, plan, limits, budget)
        if expected is None:
            with pytest.raises(BudgetError):
                sizing.largest(model, plan, limits, budget)
            outcomes.add("none")
            continue
        found = sizing.largest(model, plan, limits, budget)
        assert found == expected
        assert plan.nbytes(found.pages) + found.workspace_bytes <= least + extra
        outcomes.add("whole" if found.context == limits.context else "part")
    assert {"none", "whole"} <= outcomes


def test_a_named_size_is_obeyed_or_refused_with_the_numbers():
    limits = limits_of(FULL)
    plan = plan_of(FULL, limits)
    needed = plan.nbytes(20) + limits.needs(FULL, 160)
    assert sizing.named(FULL, plan, limits, Budget(needed, needed, 0.01), 160).pages == 20
    with pytest.raises(BudgetError, match="a cache of 20 pages of 8 tokens needs") as refused:
        sizing.named(FULL, plan, limits, Budget(needed, needed - 1, 1.0), 160)
    assert f"{limits.needs(FULL, 160):,} of workspace" in str(refused.value)


def test_no_more_pages_are_taken_than_requests_can_use():
    for model, each in ((FULL, 50), (HALF, 50), (SLIDING, 6)):
        limits = limits_of(model)
        budget = Budget(10**9, 10**9, 1.0)
        assert sizing.chosen(model, plan_of(model, limits), limits, budget).pages == 3 * each


def meta(shape: tuple[int, ...], kind: str) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, kind), device="meta")


def test_f27_the_padding_page_is_in_the_plan_even_where_a_page_is_huge():
    """A capacity kind: usable pages are planned, one more is allocated, and memory runs out."""
    model = replace(geometry(CONFIGS["llama-3.1-8b"]), num_layers=60, windows=(None,) * 60)
    limits = Limits(131072, 128, 16, 512)
    plan = plan_of(model, limits, "bf16")
    assert plan.page_bytes == 60 * 8 * 128 * 2 * 2 * 128  # 30 MiB
    budget = Budget(24 * 2**30, 8 * 2**30, 1.0)
    pages = sizing.chosen(model, plan, limits, budget).pages
    needed = sizing.largest(model, plan, limits, budget).workspace_bytes
    pool = Pool(plan, pages, empty=meta, to_host=lambda plane: plane)
    room = 8 * 2**30 - needed
    assert room - plan.page_bytes < pool.nbytes <= room
    # usable ones, the padding page beside
    assert sizing.chosen(model, plan, limits, budget, num_tokens=128 * 40).pages == 40


def test_f33_a_small_card_at_a_high_ratio_keeps_room_for_the_workspace():
    """A capacity kind: 0.95 of 6 GB for weights and cache leaves none for what attention needs."""
    model, free = geometry(CONFIGS["qwen2.5-7b"]), 6 * 10**9
    limits = Limits(32768, 16, 16, 512)
    plan = plan_of(model, limits)
    budget = Budget(free, free - 35 * 10**8, 0.95)
    found = sizing.largest(model, plan, limits, budget)
    assert found.workspace_bytes > 256 * 2**20
    total = 35 * 10**8 + plan.nbytes(found.pages) + found.workspace_bytes
    assert 0.94 * free < total <= 0.95 * free


@pytest.fixture
def serve(monkeypatch):
    """`build_engine` of a model that is never loaded, on a machine with so much memory."""

    def run(free: list[int], **options: Any) -> None:
        config = SimpleNamespace(to_dict=lambda: CONFIGS["qwen2.5-7b"])
        source = ModelSource(Path("qwen"), "directory", "qwen")
        monkeypatch.setattr(compose, "resolve", lambda _: source)
        monkeypatch.setattr(compose, "read_config", lambda _: config)
        monkeypatch.setattr(compose.machine, "free_bytes", lambda _: free.pop(0))
        model, shape = torch.nn.Linear(1, 1), geometry(config.to_dict())
        loaded = LoadedModel(model, None, shape, "qwen")
        monkeypatch.setattr(compose, "load", lambda *_, **__: loaded)
        monkeypatch.setattr(compose.attention, "install", lambda _: None)
        build_engine(ServeOptions("qwen", device="cpu", dtype="bfloat16", **options))

    return run


def test_f37_weights_beyond_their_share_have_a_message_of_their_own(serve):
    """A capacity kind: a negative budget is no matter of the cache's size."""
    with pytest.raises(BudgetError) as refused:
        serve([20 * 10**9, 5 * 10**9], memory_ratio=0.7)
    text = str(refused.value)
    assert text.startswith("nothing is left for the cache")
    assert "0.7 of the 20,000,000,000 bytes free before loading" in text
    assert "less 15,000,000,000 of weights" in text and "raise memory_ratio" in text


def test_a_cache_larger_than_all_memory_is_refused_before_weights_load(serve):
    free = [10**9]
    with pytest.raises(BudgetError, match="a cache of 65536 pages of 16 tokens needs"):
        serve(free, num_tokens=2**20)
    assert free == []  # asked once: before loading


def test_a_machine_without_room_for_any_cache_is_told_before_weights_load(serve):
    with pytest.raises(BudgetError, match="of workspace"):
        serve([2 * 10**7])


def test_a_context_that_cannot_fit_is_refused_before_weights_load(serve):
    free = [2 * 10**9]
    with pytest.raises(ConfigError, match=r"max_model_len 32,768 does not fit in a cache of bf16"):
        serve(free, max_model_len=32768, kv_cache_dtype="bf16")
    assert free == []


def test_pages_may_be_named(serve):
    with pytest.raises(BudgetError, match="a cache of 65536 pages of 16 tokens needs"):
        serve([10**9], num_pages=65536)
