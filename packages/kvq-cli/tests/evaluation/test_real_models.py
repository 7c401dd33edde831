"""Logits of a real model over its cache are transformers' own over decoded rows."""

import numpy as np
import pytest
import torch
from evaluating import plain_logits

from kvq_cli.choosing import choose_cache
from kvq_cli.evaluation.caches import FormatCache
from kvq_cli.models import attention
from kvq_cli.models.loader import load
from kvq_cli.models.source import resolve
from kvq_cli.serve_options import ServeOptions

TOKENS, CHUNK = 80, 48
TEXT = (
    "A lighthouse keeper counts the ships that pass at night by their lamps: white over red for a "
    "pilot, two white for a tug with a tow, green to starboard. In fog he counts the bells. "
) * 3


@pytest.fixture(scope="module", params=["float32", "float64"])
def real(request, smollm2_gguf):
    """SmolLM2 in a dtype, attending through kvq, and tokens of a text."""
    loaded = load(resolve(str(smollm2_gguf)), dtype=getattr(torch, request.param))
    attention.install(loaded.model)
    return loaded, loaded.tokenizer.encode(TEXT)[:TOKENS]


def logits(loaded, tokens, name):
    """Over the cache that serves, in chunks that are stored before they are read."""
    shape, dtype = loaded.geometry, loaded.model.dtype
    options = ServeOptions("real", prefill_reads="packed", max_prefill_tokens=CHUNK)
    choice = choose_cache(name, shape, options, loaded.model.device, dtype)
    cache = FormatCache(
        loaded.model, loaded.tokenizer, shape, choice, chunk_tokens=CHUNK, capacity=[TOKENS]
    )
    return torch.cat([chunk.logits for chunk in cache.forced(tokens)]).double().numpy()


def nll(found, tokens):
    shifted = found[:-1] - found[:-1].max(-1, keepdims=True)
    probabilities = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return -float(np.mean([row[t] for row, t in zip(probabilities, tokens[1:], strict=True)]))


def test_over_the_lossless_cache(real):
    loaded, tokens = real
    assert abs(logits(loaded, tokens, "fp32") - plain_logits(loaded.model, tokens)).max() < 1e-4


@pytest.mark.parametrize("name", ["bf16", "q8_0", "q4_0"])
def test_over_caches_that_round(real, name):
    """Sums in another order push values over the edges of a rounding in float32, not in float64."""
    loaded, tokens = real
    found, plain = logits(loaded, tokens, name), plain_logits(loaded.model, tokens, name, name)
    apart = abs(nll(found, tokens) - nll(plain, tokens))
    if loaded.model.dtype == torch.float64:
        assert abs(found - plain).max() < 1e-4
        assert apart < 1e-4
    else:
        assert apart < {"bf16": 2e-3, "q8_0": 1e-2, "q4_0": 0.2}[name]
