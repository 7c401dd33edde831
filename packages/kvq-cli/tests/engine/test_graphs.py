"""Steps of decodes alone over tensors that stay: on a GPU from graphs, here by the same calls."""

import pytest
import torch
from tiny_models import gemma, greedy, llama, make_engine, random_prompt, run

from kvq_attention.support import Choice
from kvq_cli.compose import ServeOptions, build_engine
from kvq_cli.config import ConfigError
from kvq_cli.engine import graphs

REFERENCE = Choice("reference", "reference", "reference")
TRITON = Choice("triton", "triton", "triton")
PLACES = [
    pytest.param("cpu", REFERENCE, id="cpu"),
    pytest.param("cuda", TRITON, marks=pytest.mark.gpu, id="cuda"),
]


def capture_here(run):
    """What a graph does, without one: the tensors are what a replay reads and writes."""
    out = run().clone()

    def replay():
        replayed.append(len(out))
        out.copy_(run())

    return replay, out


replayed = []


def engine_over(model, rows, backends=REFERENCE, **options):
    """An engine that replays decodes of up to so many requests; each graph's rows are noted."""
    replayed.clear()
    engine = make_engine(model, cuda_graph_max_bs=rows, backends=backends, **options)
    if engine.runner.device.type == "cpu":
        engine.runner._capture = capture_here
    return engine


def test_there_are_few_sizes_and_the_largest_is_what_was_asked_for():
    assert graphs.sizes(1) == (1,)
    assert graphs.sizes(3) == (1, 2, 3)
    assert graphs.sizes(16) == (1, 2, 4, 8, 16)
    assert graphs.sizes(20) == (1, 2, 4, 8, 16, 20)


@pytest.mark.parametrize(("device", "backends"), PLACES)
@pytest.mark.parametrize(("make", "cache"), [(llama, "k=q8_0,v=q4_0"), (gemma, "fp32")])
def test_replayed_decodes_give_the_tokens_of_eager_ones(make, cache, device, backends):
    """Requests of other lengths end at other times, and new ones take their rows and pages."""
    model = make(head_dim=64).to(device)
    work = {
        f"{i}": (random_prompt(3 + 7 * i), greedy(count))
        for i, count in enumerate((9, 30, 4, 17, 12, 25, 8))
    }
    options = {"cache": cache, "page_tokens": 16, "num_pages": 24, "max_running_requests": 5}

    def tokens(rows):
        engine = engine_over(model, rows, backends, **options)
        deltas = run(engine, work)
        assert engine.cache.space.check_integrity() is None
        return {name: [t for d in given for t in d.token_ids] for name, given in deltas.items()}

    eager = tokens(0)
    assert not replayed
    assert tokens(5) == eager
    if device == "cpu":
        assert {1, 2, 5} <= set(replayed)
    assert tokens(3) == eager, "steps of more decodes are computed as before"


def test_preempted_requests_come_back_into_graphs():
    model = llama(head_dim=64)
    work = {name: (random_prompt(12), greedy(20)) for name in "abc"}
    options = {"page_tokens": 4, "num_pages": 14, "cache_type": "none"}
    eager = run(engine_over(model, 0, **options), work)
    engine = engine_over(model, 4, **options)
    assert run(engine, work) == eager
    assert engine.stats().preemptions_total > 0 and replayed


def test_a_rebuilt_cache_has_graphs_of_its_own():
    model = llama(head_dim=64)
    options = {"page_tokens": 16, "num_pages": 16, "cache_type": "none"}
    engine = engine_over(model, 2, cache="q8_0", **options)
    before = run(engine, {"a": (random_prompt(20), greedy(8))})
    old = engine.runner._decode_graphs()
    engine.rebuild(num_tokens=512)
    assert engine.runner._graphs is None
    assert run(engine, {"a": (random_prompt(20), greedy(8))}) == before
    assert engine.runner._decode_graphs() is not old
    table = engine.runner._decode_graphs()._graphs[1].static.batch.tables["full"].page_table
    assert table.shape == (1, engine.context_tokens // 16)


def test_all_graphs_are_made_at_the_start():
    engine = engine_over(llama(head_dim=64), 4)
    assert engine.runner.prepare() == 3
    assert set(engine.runner._decode_graphs()._graphs) == {1, 2, 4}
    assert engine_over(llama(head_dim=64), 0).runner.prepare() == 0


def test_a_cpu_has_no_graphs(tmp_path):
    llama(head_dim=64).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"cuda_graph_max_bs 4 asks for CUDA graphs.*cpu"):
        build_engine(ServeOptions(str(tmp_path), device="cpu", cuda_graph_max_bs=4))
    with pytest.raises(ConfigError, match="at least 0, got -1"):
        ServeOptions("m", cuda_graph_max_bs=-1)


@pytest.mark.gpu
def test_a_gpu_replays_without_a_launch_from_the_host():
    model = llama(head_dim=64).to("cuda")
    engine = engine_over(model, 2, TRITON, page_tokens=16, num_pages=16)
    run(engine, {"a": (random_prompt(20), greedy(4))})
    graph = engine.runner._decode_graphs()._graphs[1]
    before = graph.logits.clone()
    graph.static.tokens.fill_(5)
    graph.replay()
    torch.cuda.synchronize()
    assert not torch.equal(graph.logits, before)
