"""Figures of `kvq eval` are those of transformers over a plain cache of decode(encode(rows))."""

import math

import pytest
import torch
from evaluating import CONTEXT, Words, evaluate, letters, plain_figures, plain_logits
from tiny_models import gemma, llama

from kvq_cli.choosing import choose_cache
from kvq_cli.config import geometry
from kvq_cli.evaluation.caches import FormatCache
from kvq_cli.evaluation.texts import tokenize
from kvq_cli.models import attention
from kvq_cli.serve_options import ServeOptions

# Float32 sums in another order move some values across an edge of their rounding; float64 leaves
# what records round off.
CLOSE = {torch.float32: 1e-4, torch.float64: 5e-6}
KL_CLOSE = {torch.float32: 2e-3, torch.float64: 1e-5}
PAIRS = [("fp32", "fp32"), ("bf16", "bf16"), ("q8_0", "q8_0"), ("q4_0", "q4_0"), ("q8_0", "q4_0")]
MODELS = {
    "float32": (llama, torch.float32),
    "float64, sliding windows": (gemma, torch.float64),
}


@pytest.fixture(scope="module", params=MODELS)
def evaluated(request):
    """A model, the windows of its text, and the rows of its record by format."""
    make, dtype = MODELS[request.param]
    model = make().to(dtype)
    text, tokenizer = letters(2 * CONTEXT, seed=1), Words(begin=95)
    formats = [k if k == v else f"k={k},v={v}" for k, v in PAIRS]
    record = evaluate(model, *formats, text=text, tokenizer=tokenizer)
    windows = tokenize(tokenizer, text).windows(CONTEXT, None, 4096)
    assert record["text"]["tokens"] == sum(map(len, windows)) >= CONTEXT
    return model, windows, {row["format"]: row for row in record["rows"]}


@pytest.mark.parametrize(("k", "v"), PAIRS)
def test_perplexity_and_kl_are_those_of_a_plain_cache(evaluated, k, v):
    model, windows, rows = evaluated
    perplexity, kl, agreement = plain_figures(model, windows, k, v)
    row = rows[k if k == v else f"k={k},v={v}"]
    assert math.log(row["perplexity"]) == pytest.approx(
        math.log(perplexity), abs=CLOSE[model.dtype]
    )
    assert row["kl_mean"] == pytest.approx(kl, rel=KL_CLOSE[model.dtype], abs=1e-9)
    assert row["top1_agreement"] == pytest.approx(agreement, abs=1e-4)


def test_logits_over_the_lossless_cache_are_those_of_transformers(evaluated):
    model, windows, _ = evaluated
    dtype, shape = model.dtype, geometry(model.config.to_dict())
    options = ServeOptions("tiny", prefill_reads="packed", max_prefill_tokens=48)
    choice = choose_cache("fp32", shape, options, model.device, dtype)
    attention.install(model)
    cache = FormatCache(model, Words(), shape, choice, chunk_tokens=48, capacity=[len(windows[0])])
    logits = torch.cat([chunk.logits for chunk in cache.forced(windows[0])])
    assert abs(logits.double().numpy() - plain_logits(model, windows[0])).max() < 1e-4


def test_rounding_costs_more_the_coarser_it_is(evaluated):
    rows = evaluated[2]
    order = [rows[name]["kl_mean"] for name in ("fp32", "bf16", "q8_0", "k=q8_0,v=q4_0", "q4_0")]
    assert order[0] == 0.0 < order[1]
    assert order == sorted(order)
