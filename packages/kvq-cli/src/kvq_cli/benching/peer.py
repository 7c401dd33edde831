"""transformers' own decodes, of the same model, beside the engine's."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import torch

from kvq_cli.models import attention

STEPS = 16


def decode_ms(model: Any, batch: int, context: int, repeat: int = 3) -> float:
    """Milliseconds of a step of `generate` with its dynamic cache, by SDPA; median.

    Of greedy answers to `batch` prompts of `context` random tokens: what the last steps add to the
    time that the first take.
    """
    model.set_attn_implementation("sdpa")
    draw = random.Random(batch)
    vocabulary = model.config.vocab_size
    prompts = [[draw.randrange(5, vocabulary) for _ in range(context)] for _ in range(batch)]
    ids = torch.tensor(prompts, device=next(model.parameters()).device)
    try:
        _generate(model, ids, 2)
        times = [_generate(model, ids, 2 + STEPS) - _generate(model, ids, 2) for _ in range(repeat)]
    finally:
        attention.install(model)
    return statistics.median(times) / STEPS * 1e3


def _generate(model: Any, ids: torch.Tensor, new: int) -> float:
    """Seconds until so many tokens are on the host."""
    start = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
    ).tolist()
    return time.perf_counter() - start
