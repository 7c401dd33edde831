"""Steps of decodes alone over tensors that stay: on a GPU from graphs, here by the same calls."""

import pytest
import torch
from graph_captures import (
    PLACES,
    REFERENCE,
    TRITON,
    capture_here,
    check_a_capture_that_the_driver_ends,
    replayed,
)
from own_process import alone
from tiny_models import gemma, greedy, llama, make_engine, random_prompt, run

from kvq_attention import ops
from kvq_cli.compose import ServeOptions, build_engine
from kvq_cli.config import ConfigError
from kvq_cli.engine import graphs
from kvq_cli.engine.params import SamplingParams


def engine_over(model, rows, backends=REFERENCE, **options):
    """An engine that replays decodes of up to so many requests; each graph's rows are noted."""
    replayed.clear()
    engine = make_engine(model, cuda_graph_max_bs=rows, backends=backends, **options)
    if engine.runner.device.type == "cpu":
        engine.runner._capture = lambda: capture_here
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


@pytest.mark.parametrize("rows", [0, 3])
def test_kernels_are_told_how_many_requests_usually_run_not_how_many_do(rows, monkeypatch):
    """In every step, replayed or not: kernels cut requests by it, so it decides last bits."""
    told = []
    decode = ops.decode

    def noted(*args, **kwargs):
        told.append(args[3].usual_requests)
        return decode(*args, **kwargs)

    monkeypatch.setattr(ops, "decode", noted)
    engine = engine_over(llama(head_dim=64), rows, max_running_requests=17)
    run(engine, {name: (random_prompt(3), greedy(4 + i)) for i, name in enumerate("abcd")})
    assert told and set(told) == {3}, "an eighth of those that may"
    assert bool(replayed) == bool(rows)


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
    table = engine.runner._decode_graphs().making.graphs[1].static.batch.tables["full"].page_table
    assert table.shape == (1, engine.context_tokens // 16)
    engine.rebuild(num_tokens=64)
    assert run(engine, {"a": (random_prompt(20), greedy(8))}) == before
    table = engine.runner._decode_graphs().making.graphs[1].static.batch.tables["full"].page_table
    assert table.shape == (1, 4), "no request is longer, and memory is left for no longer one"


def test_all_graphs_are_made_at_the_start():
    engine = engine_over(llama(head_dim=64), 4)
    assert engine.runner.prepare() == (3, 0)
    assert set(engine.runner._decode_graphs().making.graphs) == {1, 2, 4}
    assert engine_over(llama(head_dim=64), 0).runner.prepare() == (0, 0)


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
    graph = engine.runner._decode_graphs().making.graphs[1]
    before = graph.logits.clone()
    with torch.inference_mode():
        graph.static.tokens.fill_(5)
        graph.replay()
    torch.cuda.synchronize()
    assert not torch.equal(graph.logits, before)


@pytest.mark.gpu
def test_what_waits_for_the_device_is_served_without_graphs(caplog):
    """As the reference does on a GPU: one warning says so, and nothing is broken."""
    model = llama(head_dim=64).to("cuda")
    work = {f"{n}": (random_prompt(20 + n, n), greedy(9)) for n in range(3)}
    options = {"page_tokens": 16, "num_pages": 32, "max_prefill_tokens": 64}
    eager = run(engine_over(model, 0, REFERENCE, **options), work)
    engine = engine_over(model, 4, REFERENCE, cuda_graph_max_prefill_tokens=64, **options)
    assert engine.runner.prepare() == (0, 0)
    assert run(engine, work) == eager
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and all("synchronizing CUDA operation" in each for each in said), said
    over = engine_over(model, 4, TRITON, cuda_graph_max_prefill_tokens=64, **options)
    assert over.runner.prepare() == (3, 3), "graphs of others can be made afterwards"
    assert run(over, work)


@pytest.mark.gpu
@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_what_failed_is_done_before_anything_else_is(fails_at):
    """Its tensors' memory is another's at once: a late write would be into that."""
    written, calls = torch.zeros(8, device="cuda"), []

    def late():
        calls.append(written.clone())  # an empty graph would be warned of
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda._sleep(200_000_000)
            written.add_(1)
        if len(calls) > fails_at:
            raise RuntimeError("cannot be captured")
        return written.clone()

    with pytest.raises(RuntimeError, match="cannot be captured"):
        graphs.OnGpu()(late)
    assert written.clone().tolist() == [min(fails_at + 1, 2)] * 8
    again = graphs.OnGpu()  # and others can be made
    replay, out = again(lambda: written * 2)
    replay()
    assert out.tolist() == (written * 2).tolist()


@pytest.mark.gpu
def test_nothing_stays_of_a_capture_that_the_driver_ends():
    alone(check_a_capture_that_the_driver_ends)


def test_decodes_whose_graph_cannot_be_made_are_computed_without(caplog):
    model = llama(head_dim=64)
    work = {f"{n}": (random_prompt(9, n), greedy(6 + n)) for n in range(3)}
    eager = run(engine_over(model, 0), work)
    for fails_from in (0, 1, 2):
        caplog.clear()
        engine, tried = engine_over(model, 4), []

        def failing(run, tried=tried, last=fails_from):
            tried.append(run)
            if len(tried) > last:
                raise RuntimeError("a model that\nwaits")
            return capture_here(run)

        engine.runner._capture = lambda failing=failing: failing
        assert engine.runner.prepare() == (fails_from, 0)
        assert engine.runner.graph_rows == 0, "no step begins before the one before it is read"
        assert run(engine, work) == eager and len(tried) == fails_from + 1
        assert bool(replayed) == bool(fails_from), "those that were made are used"
        assert [record.getMessage() for record in caplog.records] == [
            "no more CUDA graphs of decodes can be made: RuntimeError: a model that waits"
        ]


def test_a_step_ahead_whose_graph_cannot_be_made_is_not_begun(caplog):
    """Fewer requests go on than began: theirs is another graph, made as it is needed."""
    model = llama(head_dim=64)
    work = {f"{n}": (random_prompt(9, n), greedy(20)) for n in range(3)}
    engine, tried = engine_over(model, 4), []

    def failing(run):
        tried.append(run)
        if len(tried) > 1:
            raise RuntimeError("no more memory")
        return capture_here(run)

    def one_leaves(engine, number):
        if number == 5:
            assert engine.computing._ahead is not None
            engine.cancel("0")

    eager, _ = generated(engine_over(model, 0), work)
    engine.runner._capture = lambda: failing
    got, _ = generated(engine, work, one_leaves)
    assert got["1"] == eager["1"] and got["2"] == eager["2"] and len(tried) == 2
    assert [record.getMessage() for record in caplog.records] == [
        "no more CUDA graphs of decodes can be made: RuntimeError: no more memory"
    ]


def count_ahead(engine):
    """How many steps begin before the tokens of the one before are read, by their requests."""
    begun, forward_ahead = [], engine.runner.forward_ahead

    def counted(requests, tokens):
        begun.append([r.request_id for r in requests])
        return forward_ahead(requests, tokens)

    engine.runner.forward_ahead = counted
    return begun


WORK = {
    name: (random_prompt(5 + 9 * i), SamplingParams(max_tokens=14 + 5 * i, **params))
    for i, (name, params) in enumerate(
        {
            "greedy": {"temperature": 0.0},
            "seeded": {"temperature": 0.9, "seed": 3},
            "cut": {"temperature": 1.2, "top_p": 0.8, "top_k": 30, "min_p": 0.01, "seed": 4},
            "ignores the end": {"temperature": 2.0, "seed": 5, "ignore_eos": True},
            "biased": {"temperature": 0.7, "logit_bias": ((7, 3.0), (9, -50.0)), "seed": 6},
        }.items()
    )
}


def generated(engine, work, each_step=lambda engine, number: None):
    """The tokens and the reason of each request that was not cancelled."""
    for name, (prompt, params) in work.items():
        engine.add(name, prompt, params)
    found, reasons, number = {name: [] for name in work}, {}, 0
    while engine.has_work:
        for name, delta in engine.step():
            found.setdefault(name, []).extend(delta.token_ids)
            if delta.finish_reason:
                reasons[name] = delta.finish_reason
        number += 1
        each_step(engine, number)
    assert engine.cache.space.check_integrity() is None
    return found, reasons


@pytest.mark.parametrize(("device", "backends"), PLACES)
@pytest.mark.parametrize("make", [llama, gemma])
def test_steps_begun_before_tokens_are_read_give_the_same_tokens(make, device, backends):
    model = make(head_dim=64).to(device)
    options = {"cache": "fp32", "page_tokens": 16, "num_pages": 40}
    eager = generated(engine_over(model, 0, backends, **options), WORK)
    engine = engine_over(model, 8, backends, **options)
    begun = count_ahead(engine)
    assert generated(engine, WORK) == eager
    assert ["greedy", "seeded", "cut", "ignores the end", "biased"] in begun
    assert len(begun) > 20


@pytest.mark.parametrize(
    "params",
    [
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.3},
        {"logprobs": 2},
    ],
)
def test_nothing_begins_before_tokens_that_it_needs_to_know(params):
    work = {"a": (random_prompt(9), SamplingParams(max_tokens=8, temperature=0.0, **params))}
    model = llama(head_dim=64)
    eager = generated(engine_over(model, 0), work)
    engine = engine_over(model, 4)
    begun = count_ahead(engine)
    assert generated(engine, work) == eager
    assert not begun


def test_whatever_comes_between_two_steps_loses_nothing():
    """Requests come, are cancelled and the cache is rebuilt while the next step is computed."""
    model = llama(head_dim=64)
    late = random_prompt(21)

    def between(engine, number):
        if number == 5:
            engine.add("late", late, greedy(9))
        if number == 9:
            engine.cancel("cut")
        if number == 12:
            engine.rebuild(num_tokens=400)
        if number == 15:
            engine.rebuild(num_tokens=512)

    results = []
    for rows in (0, 8):
        engine = engine_over(model, rows, page_tokens=4, num_pages=128)
        begun = count_ahead(engine)
        found, reasons = generated(engine, WORK, between)
        assert bool(begun) == bool(rows)
        results.append(({name: found[name] for name in found if name != "cut"}, reasons))
        assert results[0][0]["late"] == found["late"]
    assert results[0] == results[1]


def test_pages_that_twins_and_the_prefix_cache_share_are_what_graphs_read():
    """Equal conversations at the same time: full pages become one, under a running graph."""
    model = llama(head_dim=64)
    prompt = random_prompt(11)
    work = {name: (prompt, greedy(40)) for name in "abc"}
    other = {name: (random_prompt(11), greedy(40)) for name in "de"}

    def tokens(rows):
        engine = engine_over(model, rows, page_tokens=2, num_pages=256, max_running_requests=12)
        engine.add("t", prompt, SamplingParams(max_tokens=30, seed=1), ["t1", "t2"])
        first = generated(engine, work)
        return first, generated(engine, {**other, **work})  # all are found there

    assert tokens(12) == tokens(0)


def test_no_page_is_taken_ahead_that_a_step_needs():
    """Where pages run out, requests that came last are preempted as they would be without."""
    model = llama(head_dim=64)
    work = {name: (random_prompt(6 + i), greedy(20)) for i, name in enumerate("abcd")}
    options = {"page_tokens": 2, "num_pages": 40, "cache_type": "none"}
    eager = generated(engine_over(model, 0, **options), work)
    engine = engine_over(model, 4, **options)
    assert generated(engine, work) == eager
    assert engine.stats().preemptions_total > 0


def test_a_step_that_fails_ahead_fails_its_culprit_alone():
    model = llama(head_dim=64)
    work = {name: (random_prompt(6 + i), greedy(20)) for i, name in enumerate("abc")}
    eager = generated(engine_over(model, 0), work)
    engine = engine_over(model, 4)
    calls, forward_ahead = [], engine.runner.forward_ahead

    def failing(requests, tokens):
        calls.append(len(requests))
        if len(calls) == 4:
            raise RuntimeError("a kernel")
        return forward_ahead(requests, tokens)

    engine.runner.forward_ahead = failing
    assert generated(engine, work) == eager, "nothing was wrong with any of them"
    assert len(calls) > 5
