"""The estimate of a step's workspace against the bytes that really live during steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from geometries import shape
from live_memory import LiveMemory
from published import CONFIGS
from transformers import AutoConfig, AutoModelForCausalLM
from workspace_cases import CASES, SIZES, engine_of, params_of

from kvq_attention import reference, support
from kvq_attention.claims import SUPPORT
from kvq_attention.cuda import items
from kvq_attention.cuda.items import ROWS
from kvq_attention.triton import tiles
from kvq_attention.triton.decode import WARPS
from kvq_attention.triton.extending import shapes
from kvq_attention.triton.extending.items import MOST_PARTS as MOST_PARTS_OF_EXTENDS
from kvq_attention.triton.scales import SCORE_ROWS
from kvq_cli.config import geometry, kernels_serve, usual_requests, workspace
from kvq_cli.config.workspace import (
    BLOCK_ROWS,
    CHUNK,
    KERNEL_HEAD_DIMS,
    KERNEL_PAGE_TOKENS,
    MOST_AT_ONCE,
    MOST_CHUNKS,
    MOST_PARTS,
    PACKED_CHUNK,
    PIECE_ROWS,
    SCORE_BYTES,
    TILE_ROWS,
)


def peak_bytes(
    model: Any, cache: str, context: int, chunk: int, requests: int = 1, top_p: float = 0.0
) -> int:
    """Most bytes alive in any step while requests fill their context."""
    engine, params = engine_of(model, cache, context, chunk, requests), params_of(top_p)
    for name in range(requests):
        engine.add(str(name), [1 + i % 400 for i in range(context - 2)], params)
    peak = 0
    while engine.has_work:
        with LiveMemory() as memory:
            engine.step()
        peak = max(peak, memory.peak)
    return peak


@pytest.mark.parametrize("case", CASES)
def test_f39_a_steps_workspace_is_no_more_than_estimated_and_not_far_less(case):
    """A capacity kind: the pool fits and the start fails, for what computing takes."""
    model_type, settings, cache, load = CASES[case]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(SIZES | settings))
    dtype = getattr(torch, settings.get("dtype", "float32"))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    estimate = workspace(
        geometry(config.to_dict()),
        context=load["context"],
        max_running_requests=load.get("requests", 1),
        max_prefill_tokens=load["chunk"],
        value_bytes=dtype.itemsize,
        on_host=True,
    )
    measured = peak_bytes(model, cache, **load)
    assert measured <= estimate.nbytes <= 3.5 * measured, (measured, estimate)


def test_the_meter_counts_what_lives_and_forgets_what_is_gone():
    with LiveMemory() as memory:
        a = torch.zeros(1000, dtype=torch.uint8)
        for _ in range(5):
            b = a + 1
            del b
        c = a.view(10, 100)[3:]
    assert memory.peak == 2000 and c.shape == (7, 100)


def test_the_estimate_knows_the_references_blocks():
    assert (SCORE_BYTES, BLOCK_ROWS) == (reference.SCORE_BYTES, reference.BLOCK_ROWS)


def test_workspace_grows_with_what_it_depends_on_and_shrinks_with_ranks():
    base = {"context": 4096, "max_running_requests": 4, "max_prefill_tokens": 512}

    def needed(**changes: int) -> int:
        return workspace(geometry(CONFIGS["llama-3.1-8b"]), **(base | changes)).nbytes

    for more in ({"context": 8192}, {"max_running_requests": 400}, {"max_prefill_tokens": 5120}):
        assert needed(**more) > needed()
    assert needed(value_bytes=4) > needed() > needed(on_host=True)
    assert needed(ranks=2) < needed()


@pytest.mark.parametrize("heads", [4, 9, 32])
def test_a_workspace_is_enough_for_every_shorter_request(heads):
    """Of few long rows a block of scores holds fewer bytes than of some that are shorter."""
    model = shape(num_heads=heads, num_kv_heads=1, max_position=10**7)
    row = 2 * heads * 4
    whole = [SCORE_BYTES // (row * rows) for rows in (1, 2, 3, 63, BLOCK_ROWS)]
    contexts = sorted({*whole, *(n + 1 for n in whole), *(n + n // 3 for n in whole)})
    found = [
        workspace(model, context=n, on_host=True, max_running_requests=1, max_prefill_tokens=64)
        for n in contexts
    ]
    for context, each in zip(contexts, found, strict=True):
        step = min(BLOCK_ROWS, max(1, SCORE_BYTES // (row * context)))  # as the reference takes
        assert each.attention >= 3 * context * model.head_dim * 4 + step * row * context
    assert found == sorted(found, key=lambda each: each.nbytes)


def test_where_every_layer_forgets_the_context_does_not_matter():
    model = shape(windows=(64, 64), max_position=10**6)
    limits = {"max_running_requests": 2, "max_prefill_tokens": 32}
    assert workspace(model, context=10**6, **limits) == workspace(model, context=95, **limits)


CONTEXTS = [1000, 1025, 5000, 30_000, 131_072]
LIMITS = {"max_running_requests": 4, "max_prefill_tokens": 512}
MODEL = geometry(CONFIGS["llama-3.1-8b"])
LARGEST_GPU = 304  # multiprocessors
TILES = [tiles.Config(tokens=n, warps=4, stages=2, programs=1) for n in (16, 32, 64, 128)]


def partial_bytes(chunks: int, tokens: int, requests: int) -> int:
    """What a decode asks for where query rows of pieces are 16, the most that there are."""
    group = MODEL.num_heads // MODEL.num_kv_heads
    pieces = chunks * min(tokens, requests + tokens * group // 16) * MODEL.num_kv_heads
    return pieces * 16 * (MODEL.head_dim + 1) * 4


@pytest.mark.parametrize("context", CONTEXTS)
def test_packed_prefills_keep_partial_results_on_a_gpu(context):
    """One of each query, head and chunk, as Triton's decode counts them at most."""
    fixed = [tiles.fixed(config) for config in TILES]
    chunks = max(tiles.most_chunks(context, None, 512, config) for config in fixed)
    needed = workspace(MODEL, context=context, packed_prefill=True, **LIMITS).attention
    assert needed >= partial_bytes(chunks, 512, 4)
    host = {"context": context, "on_host": True, **LIMITS}
    assert workspace(MODEL, packed_prefill=True, **host) == workspace(MODEL, **host)


@pytest.mark.parametrize("requests", [1, 16, 400])
@pytest.mark.parametrize("context", CONTEXTS)
def test_decodes_keep_partial_results_on_a_gpu(context, requests):
    """As the kernels of either backend count them at most."""
    limits = {"context": context, "max_running_requests": requests, "max_prefill_tokens": 1}
    usual, chunks = usual_requests(requests), 1
    for processors in (20, 132, LARGEST_GPU):
        heads = MODEL.num_kv_heads, MODEL.num_heads // MODEL.num_kv_heads
        wanted = [items.wanted(usual, *heads, processors, wide=wide) for wide in (False, True)]
        chunks = max(chunks, *(items.most_chunks(context, None, requests, n) for n in wanted))
        for config in (replace(config, programs=WARPS) for config in TILES):
            n = config.wanted(usual, MODEL.num_kv_heads, processors)
            chunks = max(chunks, tiles.most_chunks(context, None, requests, config, n))
    if chunks > 1:
        assert workspace(MODEL, **limits).attention >= partial_bytes(chunks, requests, requests)


@pytest.mark.parametrize("tokens", [1, 100, 512, 4096])
@pytest.mark.parametrize("requests", [1, 4, 64])
@pytest.mark.parametrize("context", CONTEXTS)
def test_the_scratch_of_prefills_lies_beside_the_parts_of_others(context, requests, tokens):
    """As Triton's extend asks for them at most; neither on a host nor where reads are packed."""
    limits = {"max_running_requests": requests, "max_prefill_tokens": tokens}
    group = MODEL.num_heads // MODEL.num_kv_heads
    rows = max(
        shapes.most_items(tokens, requests, group, context, rows)[1] for rows in (32, 64, 128)
    )
    parts = rows * MODEL.num_kv_heads * (MODEL.head_dim + 1) * 4

    def needed(scratch: int, **how: bool) -> int:
        given = {"context": context, "scratch_bytes": scratch, **limits, **how}
        return workspace(MODEL, **given).attention

    for scratch in (0, 8 << 20, 128 << 20, 4 << 30):
        assert needed(scratch) >= scratch + parts
    assert needed(4 << 30) - needed(3 << 30) == 1 << 30
    for how in ({"on_host": True}, {"packed_prefill": True}):
        assert needed(4 << 30, **how) == needed(0, **how)


def test_graphs_keep_a_step_of_decodes_beside_the_others():
    """In memory of their own, which the largest of them fills."""
    limits = {"context": 4096, "max_running_requests": 64, "max_prefill_tokens": 512}
    without = workspace(MODEL, **limits)
    graphs = [workspace(MODEL, graph_rows=rows, **limits).graphs for rows in (1, 16, 64)]
    decodes = workspace(MODEL, context=4096, max_running_requests=64, max_prefill_tokens=0)
    assert 0 < graphs[0] < graphs[1] < graphs[2] == decodes.nbytes
    given = workspace(MODEL, graph_rows=64, **limits)
    assert given.nbytes == without.nbytes + graphs[2] and without.graphs == 0


def test_graphs_of_decodes_and_of_prompts_share_their_memory():
    limits = {"context": 4096, "max_running_requests": 64, "max_prefill_tokens": 512}
    load = limits | {"scratch_bytes": 64 << 20}

    def graphs(rows: int, tokens: int) -> int:
        return workspace(MODEL, graph_rows=rows, graph_tokens=tokens, **load).graphs

    prompt = load | {"max_running_requests": 1, "max_prefill_tokens": 256}
    assert graphs(0, 256) == workspace(MODEL, **prompt).nbytes > 64 << 20
    assert graphs(64, 0) == workspace(MODEL, **limits | {"max_prefill_tokens": 0}).nbytes
    assert graphs(64, 256) == max(graphs(64, 0), graphs(0, 256))
    assert graphs(0, 0) == 0


def test_the_estimate_knows_the_kernels_constants():
    cut = PACKED_CHUNK, MOST_CHUNKS
    assert cut == (tiles.FIXED_CHUNK, tiles.FIXED_CHUNKS)
    assert (shapes.LEAST_PART, MOST_PARTS_OF_EXTENDS.value) == (CHUNK, MOST_PARTS)
    assert CHUNK == tiles.CHUNK == items.LARGEST_CHUNK
    assert tiles.SMALLEST_CHUNK == items.SMALLEST_CHUNK == CHUNK // 8
    assert max(items.FULL_PACKED, items.FULL_WIDE, WARPS) * LARGEST_GPU == MOST_AT_ONCE
    assert max(tiles.MAX_CHUNKS, items.MOST_CHUNKS) <= MOST_CHUNKS
    assert max(SCORE_ROWS.value, *ROWS) == PIECE_ROWS
    assert (
        max(
            shapes.pick(width, size, shared_bytes=nbytes).rows
            for width in (64, 128, 256)
            for size in (2, 4)
            for nbytes in (100 << 10, 228 << 10)
        )
        == TILE_ROWS
    )


def test_the_estimate_knows_what_kernels_serve(monkeypatch):
    """Of a model and pages, whatever the format."""
    monkeypatch.setattr(support, "unavailable", lambda *_: None)
    given = {"formats": [("q8_0", "q4_0")], "device": "cuda", "dtype": torch.bfloat16, "group": 4}
    for dim in range(32, 321, 32):
        for page in (1, 8, 16, 32, 64, 96, 128, 256):
            chosen = support.choose("auto", head_dim=dim, page_tokens=page, **given).by_op()
            model = replace(MODEL, head_dim=dim)
            assert kernels_serve(model, page) == ("reference" not in chosen.values()), (dim, page)
    dims = {dim for row in SUPPORT if row.backend == "triton" for dim in row.head_dims or ()}
    pages = {size for row in SUPPORT if row.backend == "triton" for size in row.page_tokens or ()}
    assert (dims, pages) == (set(KERNEL_HEAD_DIMS), set(KERNEL_PAGE_TOKENS))
