"""What is said of linear-attention states: at the start, in the status and in metrics."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from rich.console import Console
from tiny_families import tiny
from tiny_models import greedy, random_prompt, run
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvq_cli.commands import cache_facts
from kvq_cli.commands.screen import panel
from kvq_cli.compose import ServeOptions, build_engine
from kvq_cli.server.kv_protocol import Status
from kvq_cli.server.metrics import EngineCollector

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def served(tmp_path):
    """An engine of a model on disk, whose tokens are characters."""

    def serve(family, **options):
        tiny(family).save_pretrained(tmp_path)
        words = Tokenizer(models.WordLevel({chr(32 + n): n for n in range(96)}, unk_token=" "))
        words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
        PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
        wanted = ServeOptions(
            str(tmp_path), dtype="float32", device="cpu", kv_cache_dtype="fp32", num_tokens=1024,
            max_running_requests=3, threads=1, **options,
        )  # fmt: skip
        return build_engine(wanted)

    return serve


def shown(renderable) -> str:
    console = Console(width=300)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def metrics(summary, stats):
    collector = EngineCollector(SimpleNamespace(snapshot=(summary, stats)))
    samples = [sample for metric in collector.collect() for sample in metric.samples]
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


def test_bytes_and_counts_are_the_engines(served):
    served = served("qwen3_5", state_snapshots=5)
    engine, summary = served._engine, served.summary
    each = summary.state_bytes
    assert engine.runner.states.nbytes == (3 + 5) * each > 0
    prompt = random_prompt(60)
    for _ in range(2):
        run(engine, {"r": (prompt, greedy(4))})
    stats = engine.stats()
    assert "3 of running requests and 5 snapshots beside cached pages" in shown(panel(summary))

    status = Status.of("ready", None, summary, stats)
    found = status.states.model_dump()
    assert found == {
        "state_bytes": each, "running": 3, "snapshots": 5, "held": 2, "hits": 1, "evicted": 0,
        "missed_tokens": 11,  # the last page of the prompt, of which one is computed in any case
    }  # fmt: skip
    said = shown(cache_facts.status("http://here", status.model_dump()))
    assert "3 running, 2 of 5 snapshots; 1 hits, 0 evicted, 11 cached tokens computed" in said

    read = metrics(summary, stats)
    assert read["kvq_state_bytes", "running"] == 3 * each
    assert read["kvq_state_bytes", "snapshots"] == 5 * each
    assert read["kvq_state_snapshots", "held"] == 2
    assert read["kvq_state_snapshots", "free"] == 3
    assert read["kvq_state_snapshot_hits_total",] == 1
    assert read["kvq_state_snapshots_evicted_total",] == 0
    assert read["kvq_state_snapshot_missed_tokens_total",] == 11


def test_a_model_without_states_has_none_of_these_figures(served):
    served = served("qwen3")
    summary, stats = served.summary, served._engine.stats()
    status = Status.of("ready", None, summary, stats)
    assert status.states is None
    assert " states " not in shown(panel(summary))
    assert " states " not in shown(cache_facts.status("http://here", status.model_dump()))
    assert not [name for name, *_ in metrics(summary, stats) if "state_" in name]
