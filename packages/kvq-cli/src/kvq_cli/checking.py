"""What this machine computes attention with, tried on a small cache: a record for `kvq check`."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

import kvq_codecs
from kvq_attention import compiling, selfcheck, support
from kvq_attention.bench import machine as attention_machine
from kvq_attention.bench.cases import parse_shape
from kvq_attention.selfcheck import Outcome
from kvq_attention.trial import Layer
from kvq_cli import machine
from kvq_cli.automatic import automatic, room_for
from kvq_cli.choosing import choose_cache
from kvq_cli.config import (
    CacheFormat,
    check_servable,
    choose_format,
    geometry,
    parse_cache_dtype,
    parse_formats,
)
from kvq_cli.models.raw_config import find_config
from kvq_cli.models.source import ModelSource
from kvq_cli.serve_options import ServeOptions
from kvq_cli.verifying import Case, cases

# heads · head_dim · page_tokens of a trial: such a one takes seconds on a slow CPU.
MOST_VALUES = 1 << 19

Record = dict[str, Any]


def check(
    shape: str,
    cache_dtypes: Sequence[str],
    page_tokens: int,
    device: str,
    backend: str,
    dtype: str = "auto",
) -> Record:
    """Try each format and say which backend serves which op, how well, and on what machine.

    Parameters
    ----------
    shape : HEADS/KV_HEADSxHEAD_DIM
    cache_dtypes : CODEC or k=CODEC,v=CODEC, each tried once; empty = every codec
    page_tokens : tokens a page
    device : auto, cpu or cuda
    backend : attention backend, "auto" among them
    dtype : of queries, keys and values; auto = as `kvq serve` mostly computes there

    Raises kvq's ValueErrors when there is nothing to try, or when an operation that `backend`
    names cannot be tried.
    """
    formats = dict.fromkeys(map(parse_cache_dtype, cache_dtypes)) or [
        CacheFormat(name, name) for name in kvq_codecs.names()
    ]
    size = parse_shape(shape)
    where = machine.choose_device(device)
    computed = machine.choose_dtype(dtype, where, None)
    outcomes = selfcheck.run(
        [(cache.k, cache.v) for cache in formats],
        Layer(size.heads, size.kv_heads, size.dim, page_tokens),
        where.type,
        computed,
        backend=backend,
        each=bool(cache_dtypes),
        jobs=_jobs(where),
    )
    problems = [problem for outcome in outcomes for problem in outcome.problems]
    return {
        "agrees": not problems,
        "problems": problems,
        **_machine(where, backend),
        "shape": size.name,
        "page_tokens": page_tokens,
        "dtype": str(computed).removeprefix("torch."),
        "formats": [_format(outcome) for outcome in outcomes],
        "launches": _launches(outcomes),
    }


def check_model(
    model: str,
    cache_dtypes: Sequence[str],
    page_tokens: int,
    device: str,
    backend: str,
    dtype: str,
    prefill_reads: str,
) -> Record:
    """Try every kernel that serving a model would run; its weights are not needed.

    Parameters
    ----------
    model : as `kvq serve` takes it; of a directory the config.json is enough
    cache_dtypes : as `kvq serve` takes one, each tried once; empty = what it takes by itself
    page_tokens, device, backend, dtype, prefill_reads : as `kvq serve` takes them

    Raises kvq's ValueErrors where `kvq serve` would refuse.
    """
    # With it comes transformers, which a check without a model need not wait for.
    from kvq_cli.models.loader import read_config

    start = time.perf_counter()
    name, path = find_config(model)
    is_file = path.suffix.lower() == ".gguf"
    source = (
        ModelSource(path, "gguf", name) if is_file else ModelSource(path.parent, "directory", name)
    )
    config = read_config(source)
    shape = geometry(config.to_dict())
    check_servable(shape)
    where = machine.choose_device(device)
    computed = machine.choose_dtype(dtype, where, config)
    options = ServeOptions(
        model, page_tokens=page_tokens, attention_backend=backend, prefill_reads=prefill_reads
    )
    room = room_for(source, shape, options, where, computed)
    found: dict[Case, support.Choice] = {}
    chosen_formats = [
        choose_format(asked, config.to_dict(), lambda: automatic(room))
        for asked in cache_dtypes or [options.kv_cache_dtype]
    ]
    for cache_dtype in dict.fromkeys(chosen for chosen, _ in chosen_formats):
        backends = choose_cache(cache_dtype, shape, options, where, computed).backends
        formats = parse_formats(cache_dtype, shape)
        for case in cases(shape, formats, page_tokens, prefill_reads):
            found.setdefault(replace(case, layer=case.layer.small(MOST_VALUES)), backends)
    runs = [case.given(chosen) for case, chosen in found.items()]
    selfcheck.compile_ahead(runs, where.type, computed, _jobs(where))
    outcomes = [(case, case.run(chosen, where.type, computed)) for case, chosen in found.items()]
    problems = [problem for _, outcome in outcomes for problem in outcome.problems]
    return {
        "agrees": not problems,
        "problems": problems,
        **_machine(where, backend),
        "model": name,
        "page_tokens": page_tokens,
        "dtype": str(computed).removeprefix("torch."),
        "prefill_reads": prefill_reads,
        "notes": list(dict.fromkeys(note for _, notes in chosen_formats for note in notes)),
        "kernels": [_kernel(op, outcome) for case, outcome in outcomes for op in case.ops],
        "launches": _launches([outcome for _, outcome in outcomes]),
        "seconds": time.perf_counter() - start,
    }


def _jobs(device: torch.device) -> int:
    """Processes that compile: a CPU's backends have nothing to compile, or an interpreter."""
    return compiling.usual_jobs() if device.type == "cuda" else 0


def _machine(device: torch.device, backend: str) -> Record:
    """What it is computed on and with."""
    return {
        "versions": attention_machine.versions(device.type),
        "device": {
            "type": device.type,
            "name": attention_machine.hardware(device.type),
            "compute_capability": _capability(device),
        },
        "attention_backend": backend,
        "backends": {
            name: {"unavailable": support.unavailable(name, device.type)}
            for name in support.BACKENDS
        },
    }


def _kernel(op: str, outcome: Outcome) -> Record:
    """One op of a backend on a format and a layer."""
    layer = outcome.layer
    return {
        "op": op,
        "backend": outcome.backends[op],
        "format": outcome.name,
        "layer": str(layer),
        "heads": layer.heads,
        "kv_heads": layer.kv_heads,
        "head_dim": layer.head_dim,
        "window": layer.window,
        "softcap": layer.softcap,
        "sinks": layer.sinks,
        "query_tokens": layer.queries if op == "decode" else None,
        "agrees": op not in outcome.problems_by_op,
        "failed": outcome.failed.get(op),
        **_error(op, outcome),
        **_routes(op, outcome),
    }


def _format(outcome: Outcome) -> Record:
    return {
        "format": outcome.name,
        "ops": {op: _op(op, outcome) for op in support.OPS},
        "problems": outcome.problems,
    }


def _op(op: str, outcome: Outcome) -> Record:
    return {
        "backend": outcome.backends.get(op),
        "refused": outcome.refused.get(op),
        "failed": outcome.failed.get(op),
        **_error(op, outcome),
        **_routes(op, outcome),
    }


def _error(op: str, outcome: Outcome) -> Record:
    """How far it is from what it must be; nothing if it was not tried to the end."""
    if op not in outcome.errors:
        return {}
    error = outcome.errors[op]
    if op not in selfcheck.ATTEND:
        return {"wrong_rows": int(error)}
    return {"error": _finite(error), "max_error": outcome.max_error}


def _routes(op: str, outcome: Outcome) -> Record:
    """The ways that the backend has to compute it; nothing if it is one."""
    if op != "extend" or not outcome.routes:
        return {}
    return {
        "routes": {
            route.name: {
                "refused": route.refused,
                "failed": route.failed,
                **({} if route.error is None else {"error": _finite(route.error)}),
            }
            for route in outcome.routes
        }
    }


def _finite(error: float) -> float | None:
    """What JSON can say."""
    return error if math.isfinite(error) else None


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
