"""What a plan promises of formats and of large pools, with real memory and a real model."""

from __future__ import annotations

import psutil
import pytest
import torch
from large_pool import GIB, HYBRID, PAGE_TOKENS, check_real_memory, hybrid_plan
from own_process import alone
from prose import prose

from kvq_cli.choosing import choose_cache
from kvq_cli.evaluation.caches import FormatCache
from kvq_cli.models import attention
from kvq_cli.models.loader import LoadedModel
from kvq_cli.serve_options import ServeOptions

# ---- a long context in little memory ------------------------------------------------------------


def test_262k_tokens_of_q4_0_fit_in_1_41_gib_that_the_process_really_takes() -> None:
    plan = hybrid_plan("q4_0")
    pages = plan.pages_for(int(1.41 * GIB))
    assert len(HYBRID.cached_layers) == 10 and pages * PAGE_TOKENS >= 262_144
    assert plan.nbytes(pages) <= 1.41 * GIB
    if psutil.virtual_memory().available < 2 * GIB:
        pytest.skip("needs 2 GiB of free memory")
    alone(check_real_memory, plan, pages)


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
