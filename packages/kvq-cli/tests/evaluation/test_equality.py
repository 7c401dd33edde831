"""Figures of `kvq eval` are those of transformers over a plain cache of decode(encode(rows))."""

import math

import pytest
from evaluating import CONTEXT, Words, evaluate, letters, plain_figures
from tiny_models import gemma, llama

from kvq_cli.evaluation.texts import tokenize

# Float32 sums in another order: 3e-5 of a log-perplexity and 2e-3 of the smallest KL were seen.
CLOSE = 1e-4
KL_CLOSE = {"rel": 1e-3, "abs": 1e-7}
PAIRS = [("fp32", "fp32"), ("bf16", "bf16"), ("q8_0", "q8_0"), ("q4_0", "q4_0"), ("q8_0", "q4_0")]
MODELS = {"llama": llama, "sliding windows": gemma}


@pytest.fixture(scope="module", params=MODELS)
def evaluated(request):
    """A model, the windows of its text, and the rows of its record by format."""
    model = MODELS[request.param]()
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
    assert math.log(row["perplexity"]) == pytest.approx(math.log(perplexity), abs=CLOSE)
    assert row["kl_mean"] == pytest.approx(kl, **KL_CLOSE)
    assert row["top1_agreement"] == pytest.approx(agreement, abs=1e-4)


def test_rounding_costs_more_the_coarser_it_is(evaluated):
    rows = evaluated[2]
    order = [rows[name]["kl_mean"] for name in ("fp32", "bf16", "q8_0", "k=q8_0,v=q4_0", "q4_0")]
    assert order[0] == 0.0 < order[1]
    assert order == sorted(order)
