"""Which prompts' chunks are replayed where nobody says: those that are not slower so."""

import gc

import pytest
import torch
from graph_captures import TRITON, capture_here, replayed
from prompt_replays import engine_over, made
from tiny_families import tiny
from tiny_models import greedy, llama, random_prompt, run, tokens_of

from kvq_cli import compose
from kvq_cli.compose import ServeOptions
from kvq_cli.config import geometry


@pytest.mark.parametrize(
    ("host", "enough", "overhead", "most"),
    [
        pytest.param(10, 16, 0, 100, id="the host launches for longer than all take"),
        pytest.param(3, 16, 0, 32, id="than some take"),
        pytest.param(0, 16, 0, 16, id="the device takes longer for each token"),
        pytest.param(0, 64, 0, 64, id="than to read the weights for many"),
        pytest.param(0, 100, 0, 100, id="to read the weights"),
        pytest.param(10, 16, 10, 0, id="graphs are slow"),
    ],
)
def test_chunks_that_a_graph_makes_slower_are_not_replayed(host, enough, overhead, most):
    """Times of a device as many of whose tokens as are enough take as long as one."""
    engine = engine_over(llama(head_dim=64), None, max_prefill_tokens=100, page_tokens=16)
    sizes, computed = [], engine.runner._call

    def call(tokens, *rest):
        sizes.append(tokens.shape[1])
        return computed(tokens, *rest)

    def seconds(work):
        before = len(replayed)
        work()
        device = max(1.0, sizes[-1] / enough)
        return device + overhead if len(replayed) > before else max(host, device)

    engine.runner._call, engine.runner._graph_tokens, engine.runner._seconds = call, 100, seconds
    engine.runner.narrow_prompts()
    assert engine.runner.graph_tokens == most
    fitting = {n for n in (16, 32, 64, 100) if n <= most}
    assert engine.runner.prepare()[1] == len(made(engine)) == len(fitting)
    assert {size for size, _ in made(engine)} == fitting
    engine.runner.forget_graphs()
    engine.runner._seconds = lambda work: pytest.fail("measured again")
    for n in (5, 30, 60, 90):
        run(engine, {f"{n}": (random_prompt(n, n), greedy(1))})
    assert {size for size, _ in made(engine)} == fitting


def test_where_no_graph_can_be_made_none_is_measured_and_they_are_tried_anew(caplog):
    engine = engine_over(llama(head_dim=64), None, max_prefill_tokens=100, page_tokens=16)

    def failing(run):
        raise RuntimeError("no capture")

    engine.runner._capture, engine.runner._graph_tokens = lambda: failing, 100
    engine.runner.narrow_prompts()
    assert engine.runner.prepare() == (0, 0) and not made(engine)
    assert len(caplog.records) == 1
    engine.runner._capture = lambda: capture_here
    engine.rebuild(num_tokens=512)
    run(engine, {"a": (random_prompt(90), greedy(1))})
    assert [size for size, _ in made(engine)] == [100]


def test_what_breaks_a_measurement_ends_no_start(monkeypatch, caplog):
    engine = engine_over(llama(head_dim=64), None, max_prefill_tokens=100, page_tokens=16)
    monkeypatch.setattr(engine.runner, "_graph_tokens", 100)

    def seconds(work):
        raise torch.OutOfMemoryError("no memory\nis left")

    monkeypatch.setattr(engine.runner, "_seconds", seconds)
    engine.runner.narrow_prompts()
    assert engine.runner.prepare() == (0, 1), "what was made before stays"
    [said] = caplog.records
    assert said.getMessage().endswith("of prompts can be made: OutOfMemoryError: no memory is left")
    replayed.clear()
    assert run(engine, {"a": (random_prompt(20), greedy(1))})
    assert not replayed and not engine.runner.replays_prompt(20, 0)
    assert engine.runner.replays_prompt(100, 0) and engine.runner.graph_tokens == 100


def test_a_larger_cache_has_graphs_for_longer_chunks(monkeypatch):
    """That a cache was too small for some says nothing of how fast they are."""
    given = {"max_prefill_tokens": 512, "page_tokens": 16, "max_model_len": 1024, "num_pages": 4}
    engine = engine_over(llama(head_dim=64), None, **given)
    monkeypatch.setattr(engine.runner, "_graph_tokens", 512)
    monkeypatch.setattr(engine.runner, "_seconds", lambda work: 1.0)
    engine.runner.narrow_prompts()
    assert engine.max_model_len == engine.runner.graph_tokens == 64
    engine.rebuild(num_tokens=256)
    assert engine.max_model_len == engine.runner.graph_tokens == 256
    run(engine, {"a": (random_prompt(100), greedy(1))})
    assert [size for size, _ in made(engine)] == [128]


def test_chunks_are_measured_with_many_of_the_vocabulary(monkeypatch):
    """Of mixtures of experts, one token over and over would read the weights of few."""
    engine = engine_over(llama(head_dim=64), None, max_prefill_tokens=100, page_tokens=16)
    computed, seen = engine.runner._call, []

    def call(tokens, *rest):
        seen.append(len(tokens.unique()))
        return computed(tokens, *rest)

    def seconds(work):
        work()
        assert seen[-1] > 16
        return 1.0

    monkeypatch.setattr(engine.runner, "_graph_tokens", 100)
    monkeypatch.setattr(engine.runner, "_call", call)
    monkeypatch.setattr(engine.runner, "_seconds", seconds)
    engine.runner.narrow_prompts()
    assert len(seen) == 3, "one to make the graph"


@pytest.mark.gpu
def test_where_all_prompts_are_slower_replayed_decodes_are(monkeypatch):
    """From memory that no graph holds any more nothing can be captured."""
    model = llama(head_dim=64).to("cuda")
    options = {"page_tokens": 16, "num_pages": 32, "max_prefill_tokens": 64, "cuda_graph_max_bs": 4}
    work = {f"{n}": (random_prompt(20 + n, n), greedy(9)) for n in range(3)}
    eager = run(engine_over(model, 0, TRITON, **options | {"cuda_graph_max_bs": 0}), work)
    engine = engine_over(model, 64, TRITON, **options)
    torch._C._cuda_clearCublasWorkspaces()  # which keep the memory of graphs that they are in

    def seconds(work):
        return float(isinstance(getattr(work, "__self__", None), torch.cuda.CUDAGraph))

    monkeypatch.setattr(engine.runner, "_seconds", seconds)
    engine.runner.narrow_prompts()
    before = engine.runner._capturing()._memory
    assert engine.runner.graph_tokens == 0 and not made(engine)
    gc.collect()
    torch.cuda.empty_cache()
    assert engine.runner.prepare() == (3, 0)
    assert engine.runner._capturing()._memory != before
    assert {name: tokens_of(got) for name, got in run(engine, work).items()} == {
        name: tokens_of(got) for name, got in eager.items()
    }


def test_nobody_replays_prompts_without_a_gpu():
    assert engine_over(llama(head_dim=64), None).runner.graph_tokens == 0
    shapes = {name: geometry(tiny(name).config.to_dict()) for name in ("llama", "qwen3_next")}
    tokens = {
        (name, reads): ServeOptions("m", max_prefill_tokens=most, prefill_reads=reads).graph_tokens(
            shape, on_host=False
        )
        for name, shape in shapes.items()
        for reads, most in (("own", 2048), ("packed", 2048))
    }
    assert tokens == {
        ("llama", "own"): 1024,
        ("llama", "packed"): 0,
        ("qwen3_next", "own"): 0,
        ("qwen3_next", "packed"): 0,
    }
    fewer = ServeOptions("m", max_prefill_tokens=512)
    assert fewer.graph_tokens(shapes["llama"], on_host=False) == 512


@pytest.mark.parametrize(("tokens", "measured"), [(None, 1), (0, 0), (64, 0)])
def test_prompts_are_measured_at_the_start_where_nobody_says(tokens, measured, monkeypatch):
    engine = engine_over(llama(head_dim=64), 64 if tokens is None else tokens, page_tokens=16)
    calls, said = [], []
    monkeypatch.setattr(engine.runner, "narrow_prompts", lambda: calls.append("measured"))
    options = ServeOptions("m", cuda_graph_max_prefill_tokens=tokens)
    compose._prepare(engine.runner, options, said.append)
    assert len(calls) == measured
    assert (
        said == [] if tokens == 0 else said[1].endswith("1 of prompts' chunks of up to 16 tokens")
    )
