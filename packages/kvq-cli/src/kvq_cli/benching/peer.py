"""transformers' own steps, of the same model, beside the engine's."""

from __future__ import annotations

import random
import statistics
import time
from functools import partial
from typing import Any

import torch

from kvq_attention.bench.cases import Case, Extend
from kvq_cli.models import attention

STEPS = 16


def step_ms(model: Any, case: Case | Extend, repeat: int = 3) -> float | None:
    """Milliseconds of a step of `generate` with its dynamic cache, by SDPA; median.

    Of greedy answers to random prompts: decodes are what the last steps add to the time that the
    first take, a prompt is what its first token takes. None after a past: prompts are computed
    whole.
    """
    if isinstance(case, Extend) and case.past:
        return None
    model.set_attn_implementation("sdpa")
    batch, draw = case.batch if isinstance(case, Case) else 1, random.Random(case.context)
    vocabulary = model.config.vocab_size
    prompts = [[draw.randrange(5, vocabulary) for _ in range(case.context)] for _ in range(batch)]
    ids = torch.tensor(prompts, device=next(model.parameters()).device)
    measure = _decode if isinstance(case, Case) else partial(_generate, new=1)
    try:
        _generate(model, ids, 2)
        return statistics.median(measure(model, ids) for _ in range(repeat)) * 1e3
    finally:
        attention.install(model)


def _decode(model: Any, ids: torch.Tensor) -> float:
    return (_generate(model, ids, 2 + STEPS) - _generate(model, ids, 2)) / STEPS


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
