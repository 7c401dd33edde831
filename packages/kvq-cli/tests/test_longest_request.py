"""Requests are no longer than what memory to compute them was left for."""

import pytest
from tiny_models import greedy, mistral, random_prompt
from tiny_served import llama_of, options_of, room_of, serve_instead

from kvq_cli import compose, machine
from kvq_cli.capacity import Planner
from kvq_cli.config import CacheFormat, ConfigError
from kvq_cli.engine.params import RequestRejected

# What one more token takes of the workspace is many times its bytes in the cache.
SHORT = {"kv_cache_dtype": "q8_0", "max_running_requests": 2, "max_prefill_tokens": 16}
Q8 = CacheFormat("q8_0", "q8_0")


@pytest.fixture(params=range(2_500_000, 9_000_000, 1_300_001))
def served(request, tmp_path, monkeypatch):
    """An engine in little memory, all of which it may take; and what it was promised before."""
    model = llama_of(max_position_embeddings=65536)
    loaded = serve_instead(monkeypatch, tmp_path, model, request.param)
    room = room_of(tmp_path, loaded, memory_ratio=1.0, **SHORT)
    engine = compose.build_engine(options_of(tmp_path, memory_ratio=1.0, **SHORT))
    return engine, room


def test_requests_are_as_long_as_the_workspace_was_computed_for(served):
    engine, room = served
    core, summary = engine._engine, engine.summary
    assert summary.num_tokens > summary.max_model_len, "pages would hold longer ones"
    assert summary.max_model_len < 65536
    workspace = room.limits.needs(room.shape, summary.max_model_len)
    taken = room.budget.weights_bytes + core.cache.pool.nbytes + workspace
    assert taken <= room.budget.free_before_bytes
    longer = room.limits.needs(room.shape, summary.num_tokens)
    assert taken - workspace + longer > room.budget.free_before_bytes
    core.check(random_prompt(summary.max_model_len - 1), greedy(1))
    words = f"exceed the memory for computing of {summary.max_model_len} tokens"
    with pytest.raises(RequestRejected, match=words):
        core.check(random_prompt(summary.max_model_len), greedy(1))
    assert any(
        note.startswith(f"only {summary.max_model_len} of the model's 65536 tokens")
        for note in summary.notes
    )


@pytest.mark.parametrize(
    "sizes", [{"max_model_len": 1}, {"num_pages": 1, "page_tokens": 1, "max_running_requests": 1}]
)
def test_a_server_that_no_request_fits_in_does_not_start(sizes, tmp_path, monkeypatch):
    """The shortest prompt and its answer are two tokens."""
    serve_instead(monkeypatch, tmp_path, llama_of(), 1 << 30)
    with pytest.raises(ConfigError, match="no request could be served: the longest would hold 1 "):
        compose.build_engine(options_of(tmp_path, **sizes))


def test_a_plan_of_the_same_memory_says_the_same_numbers(served):
    engine, room = served
    budget_bytes = room.budget.free_before_bytes - room.budget.weights_bytes
    planned = Planner(room.shape, budget_bytes, room.limits, ()).capacity(Q8)
    assert (planned.context, planned.limit) == (engine.summary.max_model_len, "memory")
    assert planned.tokens == engine.summary.num_tokens
    assert planned.token_bytes == engine.summary.bytes_per_token


def test_a_rebuild_leaves_memory_for_all_that_its_pages_hold(served, monkeypatch):
    engine, room = served
    core = engine._engine
    before = core.max_model_len
    num_tokens = core.cache.num_tokens
    needed = room.limits.needs(room.shape, num_tokens)
    monkeypatch.setattr(machine, "free_bytes", lambda device, mapped_bytes: needed)
    report = core.rebuild(num_tokens=num_tokens)
    assert (report.before.max_model_len, report.after.max_model_len) == (before, num_tokens)
    assert core.max_model_len == core.runner.max_tokens == num_tokens


@pytest.mark.parametrize("size", [{}, {"num_tokens": 64}, {"num_tokens": 160}])
def test_where_every_layer_forgets_a_request_may_be_longer_than_the_pool(
    tmp_path, monkeypatch, size
):
    model = mistral()
    longest = model.config.max_position_embeddings
    serve_instead(monkeypatch, tmp_path, model, 12 << 20)
    core = compose.build_engine(options_of(tmp_path, **SHORT, **size))._engine
    assert core.max_model_len == core.runner.max_tokens == longest
    core.rebuild(num_tokens=96)
    assert core.max_model_len == longest > 96
