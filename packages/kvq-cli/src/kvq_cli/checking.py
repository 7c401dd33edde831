"""What this machine computes attention with, tried on a small cache: a record for `kvq check`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

import kvq_codecs
from kvq_attention import selfcheck, support
from kvq_attention.bench import machine as attention_machine
from kvq_attention.bench.cases import parse_shape
from kvq_attention.selfcheck import Outcome
from kvq_attention.trial import Layer
from kvq_cli import machine
from kvq_cli.config import CacheFormat, parse_cache_dtype

Record = dict[str, Any]


def check(
    cache_dtypes: Sequence[str], shape: str, page_tokens: int, device: str, backend: str
) -> Record:
    """Try each format and say which backend serves which op, how well, and on what machine.

    Parameters
    ----------
    cache_dtypes : CODEC or k=CODEC,v=CODEC, each tried once; empty = every codec
    shape : HEADS/KV_HEADSxHEAD_DIM
    page_tokens : tokens a page
    device : auto, cpu or cuda
    backend : attention backend, "auto" among them

    Raises kvq's ValueErrors when there is nothing to try, or when an operation that `backend`
    names cannot be tried.
    """
    formats = dict.fromkeys(map(parse_cache_dtype, cache_dtypes)) or [
        CacheFormat(name, name) for name in kvq_codecs.names()
    ]
    size = parse_shape(shape)
    where = machine.choose_device(device)
    # as `kvq serve` computes there: GPUs mostly in bfloat16, CPUs in float32
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    outcomes = selfcheck.run(
        [(cache.k, cache.v) for cache in formats],
        Layer(size.heads, size.kv_heads, size.dim, page_tokens),
        where.type,
        dtype,
        backend=backend,
        each=bool(cache_dtypes),
    )
    problems = [problem for outcome in outcomes for problem in outcome.problems]
    return {
        "agrees": not problems,
        "problems": problems,
        "versions": attention_machine.versions(where.type),
        "device": {
            "type": where.type,
            "name": attention_machine.hardware(where.type),
            "compute_capability": _capability(where),
        },
        "attention_backend": backend,
        "backends": {
            name: {"unavailable": support.unavailable(name, where.type)}
            for name in support.BACKENDS
        },
        "shape": size.name,
        "page_tokens": page_tokens,
        "dtype": str(dtype).removeprefix("torch."),
        "formats": [_format(outcome) for outcome in outcomes],
        "launches": _launches(outcomes),
    }


def _format(outcome: Outcome) -> Record:
    return {
        "format": outcome.name,
        "ops": {op: _op(op, outcome) for op in support.OPS},
        "problems": outcome.problems,
    }


def _op(op: str, outcome: Outcome) -> Record:
    found: Record = {
        "backend": outcome.backends.get(op),
        "refused": outcome.refused.get(op),
        "failed": outcome.failed.get(op),
    }
    if op in outcome.errors:
        error = outcome.errors[op]
        found |= (
            {"error": error if math.isfinite(error) else None, "max_error": outcome.max_error}
            if op in selfcheck.ATTEND
            else {"wrong_rows": int(error)}
        )
    return found


def _launches(outcomes: Sequence[Outcome]) -> dict[str, dict[str, int]]:
    totals = {backend: Counter(dict.fromkeys(support.OPS, 0)) for backend in support.BACKENDS}
    for outcome in outcomes:
        for backend, counted in outcome.launched.items():
            totals[backend].update(counted)
    return {backend: dict(total) for backend, total in totals.items()}


def _capability(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    return ".".join(map(str, torch.cuda.get_device_capability()))
