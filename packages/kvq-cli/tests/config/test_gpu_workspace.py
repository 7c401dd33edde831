"""The estimate of a step's workspace against what torch gives out and reserves on a GPU."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest
import torch
from tiny_models import make_engine
from transformers import AutoConfig, AutoModelForCausalLM
from workspace_cases import CASES, LINEAR, SIZES, engine_of, params_of

from kvq_cli.config import geometry, workspace
from kvq_cli.engine.params import SamplingParams

DENSE = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
MANY_LAYERS = DENSE | {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 5504}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model_type", "settings", "rows", "tokens"),
    [
        ("llama", {"num_attention_heads": 16}, 8, 0),
        ("llama", {"num_attention_heads": 16}, 0, 512),
        ("llama", {"num_attention_heads": 16}, 8, 512),
        # of which each graph takes more than torch's blocks are larger
        pytest.param("llama", MANY_LAYERS, 8, 512, id="many layers"),
        ("qwen3_5_text", LINEAR, 8, 0),
    ],
)
def test_graphs_take_no_more_than_estimated(model_type, settings, rows, tokens):
    load = {"max_running_requests": 8, "max_prefill_tokens": 512}
    config = AutoConfig.for_model(model_type, **(SIZES | settings))
    model = on_gpu(config)
    options = {"num_pages": 600, "page_tokens": 16, "max_model_len": 8192, "cache_type": "none"}
    shape = geometry(config.to_dict())
    replayed = {"graph_rows": rows, "graph_tokens": tokens, "scratch_bytes": 128 << 20}
    estimate = workspace(shape, context=8192, by_reference=False, **load, **replayed)

    engine = make_engine(
        model,
        cache="q8_0",
        attention_backend="triton",
        cuda_graph_max_bs=rows,
        cuda_graph_max_prefill_tokens=tokens,
        **load,
        **options,
    )

    def reserved() -> tuple[int, int]:
        """Bytes that torch reserves without graphs and with them, made anew."""
        engine.runner.forget_graphs()
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        engine.runner.prepare()
        return before, torch.cuda.memory_reserved()

    reserved()  # libraries take workspaces of their own, once
    anew = [reserved() for _ in range(3)]
    kept = anew[0][1] - anew[0][0]
    print(f"{model_type}: {kept} of {estimate.graphs}")
    assert anew == anew[:1] * 3, (_reserved(), "what graphs took is given back with them")
    assert 0 < kept <= estimate.graphs + (64 << 20), (_reserved(), "torch reserves whole blocks")


def _reserved() -> dict[tuple[Any, ...], int]:
    """Bytes that torch reserves, by graphs' pool and stream."""
    found: Counter[tuple[Any, ...]] = Counter()
    for segment in torch.cuda.memory_snapshot():
        where = segment["segment_pool_id"], segment["stream"], segment["segment_type"]
        found[where] += segment["total_size"]
    return dict(found)


def on_gpu(config: Any) -> Any:
    """A model of random weights; a host takes a minute for those of the larger ones."""
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def peak_on_gpu(engine: Any, work: dict[str, int], params: SamplingParams) -> int:
    """Most bytes that torch gave out at once in any step, beside what there was before it."""
    peak = 0
    for turn in range(2):  # libraries take workspaces of their own, once
        for name, tokens in work.items():
            engine.add(f"{turn} {name}", [1 + i % 400 for i in range(tokens)], params)
        peak = 0
        while engine.has_work:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            engine.step()
            peak = max(peak, torch.cuda.max_memory_allocated() - before)
    return peak


ON_GPUS = {
    "dense kernels": ("llama", DENSE, "q8_0", {"context": 8192, "chunk": 4096}),
    "many layers": ("llama", MANY_LAYERS, "q8_0", {"context": 8192, "chunk": 1024}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("by", ["auto", "reference"])
@pytest.mark.parametrize("case", [*CASES, *ON_GPUS])
def test_a_gpus_step_takes_no_more_than_estimated(case, by):
    """By kernels, which never hold a context as numbers, and by the reference."""
    model_type, settings, cache, load = (CASES | ON_GPUS)[case]
    context, requests = load["context"], load.get("requests", 1)
    config = AutoConfig.for_model(model_type, **(SIZES | settings | {"dtype": "bfloat16"}))
    model = on_gpu(config)
    limits = {"max_running_requests": requests, "max_prefill_tokens": load["chunk"]}
    engine = engine_of(model, cache, context, load["chunk"], requests, by)
    assert engine.cache.choice.by_reference == (by == "reference")
    estimate = workspace(
        geometry(config.to_dict()),
        context=context,
        by_reference=by == "reference",
        scratch_bytes=128 << 20,
        **limits,
    )
    params, work = params_of(load.get("top_p", 0.0)), [f"{n}" for n in range(requests)]
    peak = peak_on_gpu(engine, dict.fromkeys(work, context - 2), params)
    print(f"{case}, {by}: {peak / 2**20:.1f} of {estimate.nbytes / 2**20:.1f} MiB")
    assert 0 < peak <= estimate.nbytes, (peak, estimate)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("reads", "scratch_mb"), [("own", 0), ("own", 4), ("own", 128), ("packed", 0)]
)
def test_a_steps_workspace_on_a_gpu_is_no_more_than_estimated(reads, scratch_mb):
    """Of Triton's kernels: within the loop, through scratches of two sizes, by decodes."""
    load = {"max_running_requests": 2, "max_prefill_tokens": 2048}
    config = AutoConfig.for_model("llama", **(SIZES | {"num_attention_heads": 16}))
    model = on_gpu(config)
    options = {"prefill_reads": reads, "prefill_scratch_mb": scratch_mb}
    engine = make_engine(
        model,
        cache="q8_0",
        num_pages=1100,
        page_tokens=16,
        max_model_len=8192,
        cache_type="none",
        attention_backend="triton",
        **load,
        **options,
    )
    estimate = workspace(
        geometry(config.to_dict()),
        context=8192,
        by_reference=False,
        packed_prefill=reads == "packed",
        scratch_bytes=scratch_mb << 20,
        **load,
    )
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    peak = peak_on_gpu(engine, {"a": 8190, "b": 8190}, params)
    assert 0 < peak <= estimate.nbytes, (peak, estimate)
