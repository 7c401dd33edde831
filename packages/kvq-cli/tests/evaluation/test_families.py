"""Every family that is served can be evaluated."""

import pytest
import torch
from evaluating import CONTEXT, Words, letters
from tiny_families import FAMILIES, tiny

from kvq_cli.choosing import choose_cache
from kvq_cli.config import geometry
from kvq_cli.evaluation import heads
from kvq_cli.evaluation.caches import FormatCache
from kvq_cli.models import attention
from kvq_cli.serve_options import ServeOptions


@pytest.mark.parametrize("family", FAMILIES)
def test_kept_hidden_states_become_the_models_own_logits_again(family):
    """With all that a family does after its head: soft caps, scales, router outputs."""
    model = tiny(family)
    attention.install(model)
    shape = geometry(model.config.to_dict())
    options = ServeOptions("tiny", prefill_reads="packed", max_prefill_tokens=48)
    choice = choose_cache("bf16", shape, options, model.device, model.dtype)
    cache = FormatCache(model, Words(), shape, choice, chunk_tokens=48, capacity=[CONTEXT])
    tokens = Words().encode(letters(CONTEXT).content)
    with heads.watched(model) as seen:
        chunks = list(cache.forced(tokens))
    assert [chunk.start for chunk in chunks] == [0, 48, 96, 144]
    for chunk, hidden in zip(chunks, seen, strict=True):
        assert torch.equal(heads.logits(model, hidden), chunk.logits)
    # and the model computes all of its layers again afterwards
    again = torch.cat([chunk.logits for chunk in cache.forced(tokens)])
    assert torch.equal(again, torch.cat([chunk.logits for chunk in chunks]))
