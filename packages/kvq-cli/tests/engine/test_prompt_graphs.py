"""Prompts' chunks over tensors that stay: on a GPU from graphs, here by the same calls."""

from itertools import pairwise

import pytest
import torch
from graph_captures import PLACES, TRITON, capture_here, replayed
from prompt_replays import engine_over, made
from tiny_families import tiny
from tiny_models import gemma, greedy, llama, make_engine, mistral, random_prompt, run, tokens_of
from tiny_served import llama_of, loaded_from, room_of

from kvq_attention import ops
from kvq_attention.routes import DENSE, LOOP, Route
from kvq_cli import compose
from kvq_cli.compose import ServeOptions, build_engine, check_graphs, choose_cache
from kvq_cli.config import ConfigError, geometry
from kvq_cli.engine import prompt_graphs


def test_there_are_few_sizes_and_little_is_padded():
    assert prompt_graphs.sizes(1) == (1,)
    assert prompt_graphs.sizes(20) == (16, 20)
    assert prompt_graphs.sizes(200) == (16, 32, 64, 128, 192, 200)
    assert prompt_graphs.sizes(512) == (16, 32, *range(64, 513, 64))
    assert prompt_graphs.sizes(1100)[10:] == (640, 768, 896, 1024, 1100)
    found = prompt_graphs.sizes(8192)
    assert len(found) < 30 and all(b <= 1.25 * a for a, b in pairwise(found[9:]))


def test_a_page_table_reaches_as_far_as_some_multiple_of_what_is_seen():
    assert prompt_graphs.reaches(100) == (100,)
    assert prompt_graphs.reaches(8192) == (8192,)
    assert prompt_graphs.reaches(100_000) == (8192, 65536, 100_000)


@pytest.mark.parametrize(("device", "backends"), PLACES)
@pytest.mark.parametrize(
    ("make", "cache"), [(llama, "k=q8_0,v=q4_0"), (gemma, "fp32"), (mistral, "q8_0")]
)
def test_replayed_chunks_give_the_tokens_of_eager_ones(make, cache, device, backends, monkeypatch):
    """Chunks of all lengths, first ones and later ones, beside decodes and other prompts."""
    monkeypatch.setattr(prompt_graphs, "NEAREST", 32)
    monkeypatch.setattr(prompt_graphs, "FARTHER", 2)
    monkeypatch.setattr(prompt_graphs, "FEW", (3, 8))
    model = make(head_dim=64).to(device)
    lengths = (1, 2, 7, 16, 17, 40, 61, 90)
    options = {"cache": cache, "page_tokens": 16, "num_pages": 40, "max_prefill_tokens": 24}

    def tokens(most):
        engine = engine_over(model, most, backends, **options)
        alone = [run(engine, {f"{n}": (random_prompt(n), greedy(4))})[f"{n}"] for n in lengths]
        together = run(engine, {f"{n}": (random_prompt(n, 1), greedy(9)) for n in lengths})
        assert engine.cache.space.check_integrity() is None
        found = [tokens_of(deltas) for deltas in (*alone, *together.values())]
        return found, made(engine)

    eager, none = tokens(0)
    assert not replayed and not none
    all_chunks, graphs = tokens(24)
    assert all_chunks == eager
    assert {size for size, _ in graphs} == {3, 8, 24} and len({reach for _, reach in graphs}) > 2
    small_chunks, graphs = tokens(8)
    assert small_chunks == eager, "larger chunks are computed as before"
    assert {size for size, _ in graphs} == {3, 8}


@pytest.mark.parametrize(("device", "backends"), PLACES)
def test_a_chunk_behind_a_cached_prefix_is_replayed(device, backends):
    """The next turn of a conversation: all of it but its last words is in the prefix cache."""
    model = llama(head_dim=64).to(device)
    options = {"page_tokens": 16, "num_pages": 40, "max_prefill_tokens": 64, "cache": "q8_0"}
    first = random_prompt(100)
    answers = []
    for most in (0, 64):
        engine = engine_over(model, most, backends, **options)
        run(engine, {"a": (first, greedy(12))})
        deltas = run(engine, {"b": (first + random_prompt(20, 2), greedy(12))})["b"]
        assert deltas[0].cached_tokens == 100
        answers.append(tokens_of(deltas))
    assert answers[0] == answers[1]
    assert 32 in {size for size, _ in made(engine)}


def test_what_a_chunk_pads_is_nobodys(monkeypatch):
    """Rows behind the prompt's are stored nowhere: the pages of others keep every byte."""
    model = llama(head_dim=64)
    engine = engine_over(model, 64, page_tokens=4, max_prefill_tokens=64, cache="q8_0")
    run(engine, {"a": (random_prompt(50), greedy(3))})
    pool = engine.cache.pool
    planes = [
        plane
        for layer in range(2)
        for slab in "kv"
        for plane in pool.view(slab, layer).planes.values()
    ]
    before = [plane.clone() for plane in planes]
    engine.add("b", random_prompt(5), greedy(1))
    engine.step()
    assert replayed
    changed = torch.stack(
        [(now != old).flatten(2).any(2).any(1) for now, old in zip(planes, before, strict=True)]
    ).any(0)
    assert 1 <= int(changed[:-1].sum()) <= 2, "five tokens fill two pages of four"


def test_logits_of_every_token_are_computed_without_a_graph():
    engine = engine_over(llama(head_dim=64), 16)
    engine.add("a", random_prompt(12), greedy(2))
    step = engine.scheduler.schedule()
    every = engine.runner.forward(step, every_token=True)
    assert len(every) == 12 and not replayed
    last = engine.runner.forward(step)
    assert last.shape == every[-1:].shape and len(replayed) == 1
    torch.testing.assert_close(last, every[-1:])


def test_an_engine_makes_its_graphs_at_the_start_and_anew_for_another_cache():
    engine = engine_over(llama(head_dim=64), 100, max_prefill_tokens=70, page_tokens=16)
    assert engine.runner.prepare() == (0, 4)
    assert {size for size, _ in made(engine)} == {16, 32, 64, 70}, "no chunk is larger"
    before = run(engine, {"a": (random_prompt(20), greedy(4))})
    engine.rebuild(num_tokens=512)
    assert not made(engine)
    assert tokens_of(run(engine, {"a": (random_prompt(20), greedy(4))})["a"]) == tokens_of(
        before["a"]
    )
    assert engine_over(llama(head_dim=64), 0).runner.prepare() == (0, 0)


def test_what_dense_kernels_would_take_is_not_replayed(monkeypatch):
    """They need the request's sizes on the host, which a graph does not know."""
    engine = engine_over(llama(head_dim=64), 16)
    asked = []

    def reads_host(backend, **sizes):
        asked.append((backend, sizes))
        return sizes["past"] >= 16

    monkeypatch.setattr(ops, "extend_reads_host", reads_host)
    run(engine, {"a": (random_prompt(40), greedy(2))})
    assert asked == [
        ("reference", {"queries": count, "past": past, "heads": 4, "dim": 64})
        for count, past in ((16, 0), (16, 16), (8, 32))
    ]
    assert made(engine) == [(16, engine.max_model_len)]
    engine.runner.extend_route = Route(DENSE)
    assert not engine.runner.replays_prompt(16, 0)
    engine.runner.extend_route = Route(LOOP)
    assert engine.runner.replays_prompt(16, 32), "whatever dense kernels would take"
    assert not engine.runner.replays_prompt(15, 0), "padded, it might take rows that it has not"


def test_the_kernels_of_large_products_read_the_host():
    few = {"queries": 512, "heads": 32, "dim": 128}
    assert not ops.extend_reads_host("triton", past=8192, **few)
    assert ops.extend_reads_host("triton", past=40_000, **few)
    assert not ops.extend_reads_host("reference", past=1 << 30, **few)


def test_a_chunk_that_fails_fails_its_request_alone():
    model = llama(head_dim=64)
    engine = engine_over(model, 16)
    run(engine, {"first": (random_prompt(9), greedy(3))})
    graph = next(iter(engine.runner._prompts.making.graphs.values()))

    def broken():
        raise RuntimeError("a kernel")

    graph.replay = broken
    deltas = run(engine, {"a": (random_prompt(10), greedy(3))})["a"]
    assert deltas[-1].finish_reason == "error" and "a kernel" in deltas[-1].error
    assert not made(engine), "graphs are made anew"
    assert run(engine, {"b": (random_prompt(10), greedy(3))})["b"][-1].finish_reason == "length"


def test_a_chunk_whose_graph_cannot_be_made_is_computed_without(caplog, monkeypatch):
    """Again and again, and no other graph is lost."""
    monkeypatch.setattr(prompt_graphs, "NEAREST", 32)
    model, tried = llama(head_dim=64), []
    work = [(random_prompt(60, n), greedy(3)) for n in range(3)]
    engine = engine_over(model, 8, page_tokens=4, max_prefill_tokens=8, cuda_graph_max_bs=2)

    def failing(run):
        made = capture_here(run)
        if len(tried) >= 2:
            raise RuntimeError("out of memory in a capture")
        tried.append(made)
        return made

    engine.runner._capture = lambda: failing
    run(engine, {"first": (random_prompt(8), greedy(2))})
    assert len(tried) == 2, "a graph of a chunk and one of a decode"
    graphs = engine.runner._prompts, engine.runner._graphs
    for n, each in enumerate(work):
        got = tokens_of(run(engine, {f"{n}": each})[f"{n}"])
        assert got == tokens_of(run(engine_without(model), {"x": each})["x"])
    assert graphs == (engine.runner._prompts, engine.runner._graphs)
    assert [record.getMessage() for record in caplog.records] == [
        "no more CUDA graphs of prompts can be made: RuntimeError: out of memory in a capture"
    ]


def engine_without(model):
    """One that replays nothing."""
    return make_engine(model, page_tokens=4, max_prefill_tokens=8)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cuda_graph_max_prefill_tokens": -1}, "must be at least 0, got -1"),
        (
            {"cuda_graph_max_prefill_tokens": 8, "prefill_reads": "packed"},
            "cuda_graph_max_prefill_tokens 8 .* use prefill_reads own, or 0",
        ),
    ],
)
def test_options_that_cannot_be(options, said):
    with pytest.raises(ConfigError, match=said):
        ServeOptions("m", **options)


@pytest.mark.parametrize(
    ("device", "family", "said"),
    [
        ("cpu", "llama", "8 asks for CUDA graphs, and the device is cpu; leave it out"),
        ("cuda", "qwen3_next", "8 asks .* qwen3_next model has linear-attention layers"),
    ],
)
def test_where_there_are_no_graphs_of_prompts(device, family, said):
    model = llama() if family == "llama" else tiny(family)
    options = ServeOptions("m", cuda_graph_max_prefill_tokens=8)
    with pytest.raises(ConfigError, match=f"cuda_graph_max_prefill_tokens {said}"):
        check_graphs(options, torch.device(device), geometry(model.config.to_dict()))


@pytest.mark.gpu
def test_a_gpu_replays_a_chunk_without_a_launch_from_the_host():
    model = llama(head_dim=64).to("cuda")
    engine = engine_over(model, 64, TRITON, page_tokens=16, num_pages=16, max_prefill_tokens=64)
    run(engine, {"a": (random_prompt(20), greedy(4))})
    graph = next(iter(engine.runner._prompts.making.graphs.values()))
    before = graph._logits.clone()
    with torch.inference_mode():
        graph._chunk.tokens.fill_(5)
        graph.replay()
    torch.cuda.synchronize()
    assert not torch.equal(graph._logits, before)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [None, 0, 64])
def test_a_server_on_a_gpu_replays_prompts_unless_told_otherwise(tokens, tmp_path, monkeypatch):
    model = llama_of(dtype="bfloat16", head_dim=64).to("cuda", torch.bfloat16)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(compose, "load", lambda *_, **__: loaded_from(model))
    options = ServeOptions(
        str(tmp_path), kv_cache_dtype="q8_0", cuda_graph_max_prefill_tokens=tokens, num_tokens=4096
    )
    said = []
    engine = build_engine(options, said.append)._engine
    told = [words for words in said if words.startswith("CUDA graphs made")]
    if tokens == 0:
        assert told == ["CUDA graphs made: 5 of decodes, none of prompts"]
    else:
        most = engine.runner.graph_tokens
        assert 0 < most <= 64 if tokens else most > 0, "a host launches for longer than this takes"
        assert told == [
            f"CUDA graphs made: 5 of decodes, {len(made(engine))} of prompts' chunks of up to "
            f"{most} tokens"
        ]
    deltas = run(engine, {"a": (random_prompt(40), greedy(4))})["a"]
    assert deltas[-1].finish_reason == "length"


def test_what_is_tried_of_a_format_replays_nothing(tmp_path):
    """Whatever the server is to replay: what a format does to a model is measured by itself."""
    model = llama_of(head_dim=64)
    model.save_pretrained(tmp_path)
    loaded = loaded_from(model)
    room = room_of(tmp_path, loaded, kv_cache_dtype="q8_0", cuda_graph_max_prefill_tokens=64)
    choice = choose_cache("q8_0", room.shape, room.options, room.device, room.dtype)
    compose._harm(room, loaded, choice)("q8_0")
