"""What a plan promises of formats and of large pools, with real memory and a real model."""

from __future__ import annotations

import psutil
import pytest
import torch
from prose import prose
from published import CONFIGS

from kvq_attention import Batch, Table, ops
from kvq_cli.choosing import choose_cache
from kvq_cli.config import CacheFormat, build_plan, geometry
from kvq_cli.evaluation.caches import FormatCache
from kvq_cli.models import attention
from kvq_cli.models.loader import LoadedModel
from kvq_cli.serve_options import ServeOptions
from kvq_pools import Pool, PoolPlan, slots

HYBRID = geometry(CONFIGS["qwen3.5-35b-a3b"])  # 10 of 40 layers keep keys: 2 heads × 256
PAGE_TOKENS = 16
GIB = 1 << 30


def hybrid_plan(codec: str) -> PoolPlan:
    return build_plan(
        HYBRID,
        CacheFormat(codec, codec),
        page_tokens=PAGE_TOKENS,
        max_running_requests=1,
        max_prefill_tokens=512,
    )


# ---- a long context in little memory ------------------------------------------------------------


def test_262k_tokens_of_q4_0_fit_in_1_41_gib_that_the_process_really_takes() -> None:
    plan = hybrid_plan("q4_0")
    pages = plan.pages_for(int(1.41 * GIB))
    assert len(HYBRID.cached_layers) == 10 and pages * PAGE_TOKENS >= 262_144
    if psutil.virtual_memory().available < 2 * GIB:
        pytest.skip("needs 2 GiB of free memory")
    before = psutil.Process().memory_info().rss
    pool = Pool(
        plan,
        pages,
        empty=lambda shape, kind: torch.empty(shape, dtype=getattr(torch, kind)),
    )
    taken = psutil.Process().memory_info().rss - before
    assert pool.nbytes <= 1.41 * GIB
    # nothing beside the pool grows with it; what of it were not there would show as well
    assert abs(taken - pool.nbytes) < 16 << 20
    first, last = HYBRID.cached_layers[0], HYBRID.cached_layers[-1]
    outputs = [attend(pool, layer, [page]) for layer in (first, last) for page in (0, pages - 1)]
    assert all(torch.equal(out, outputs[0]) for out in outputs)
    assert attend(pool, first, [pages - 2, pages - 1]).isfinite().all()


def attend(pool: Pool, layer: int, table: list[int]) -> torch.Tensor:
    """Store a page's tokens, the same ones in each page of `table`; what the last one reads."""
    torch.manual_seed(0)
    count = PAGE_TOKENS * len(table)
    k, v = (torch.randn(PAGE_TOKENS, 2, 256).repeat(len(table), 1, 1) for _ in "kv")
    caches = pool.view("k", layer), pool.view("v", layer)
    places = torch.from_numpy(slots(table, 0, count, PAGE_TOKENS))
    ops.store(k, v, *caches, places, backend="reference")
    batch = Batch(
        query_offsets=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([count], dtype=torch.int32),
        tables={
            "full": Table(
                page_table=torch.tensor([table], dtype=torch.int32), slot_mapping=places[-1:]
            )
        },
        page_tokens=PAGE_TOKENS,
    )
    q = torch.randn(1, 16, 256)
    return ops.decode(q, *caches, batch, "full", scale=256**-0.5, backend="reference")


# ---- 8-bit floats -------------------------------------------------------------------------------


def test_f57_fp8_holds_twice_the_tokens_of_16_bits_in_equal_bytes() -> None:
    """But for its scale: 4 bytes beside a row's 256."""
    wanted = 131_072
    budget = hybrid_plan("bf16").nbytes(wanted // 2 // PAGE_TOKENS)
    tokens = {c: hybrid_plan(c).pages_for(budget) * PAGE_TOKENS for c in ("bf16", "fp8")}
    assert tokens["bf16"] == wanted // 2
    assert tokens["fp8"] == pytest.approx(wanted * 256 / 260, abs=PAGE_TOKENS)
    assert hybrid_plan("fp8").nbytes(wanted // PAGE_TOKENS) < 1.3 * GIB  # of a card of 8


def test_f57_fp8_changes_a_models_predictions_by_less_than_the_texts_own_noise(
    smollm2: LoadedModel,
) -> None:
    """Its perplexity is that of 16 bits to within a part of the standard error of either."""
    attention.install(smollm2.model)
    window = smollm2.tokenizer(prose(1600))["input_ids"][:384]
    exact, rounded = (text_nll(smollm2, codec, window) for codec in ("bf16", "fp8"))
    noise = exact.std() / len(exact) ** 0.5
    assert (rounded.mean() - exact.mean()).abs() < noise / 4
    # and token by token: most change by far less than what they are
    assert (rounded - exact).abs().median() < 0.1 * exact.mean()


def text_nll(loaded: LoadedModel, codec: str, window: list[int]) -> torch.Tensor:
    """−log probability [tokens − 1] of each token after the first."""
    options = ServeOptions("smollm2", prefill_reads="packed", max_prefill_tokens=64)
    device, dtype = next((p.device, p.dtype) for p in loaded.model.parameters())
    choice = choose_cache(codec, loaded.geometry, options, device, dtype)
    cache = FormatCache(
        loaded.model,
        loaded.tokenizer,
        loaded.geometry,
        choice,
        chunk_tokens=64,
        capacity=[len(window)],
    )
    logits = torch.cat([chunk.logits for chunk in cache.forced(window)])[: len(window) - 1]
    following = torch.tensor(window[1:])[:, None]
    return -logits.double().log_softmax(-1).gather(1, following)[:, 0]
