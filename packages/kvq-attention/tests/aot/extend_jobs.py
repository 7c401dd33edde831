"""Launches of the extend kernels: every format at head_dim 128, a chunk over a long past."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from compiling import AMD, Jobs
from decode_jobs import COLUMNS, HEADS, KV_HEADS, SHARED_KIB, TIER
from store_jobs import cache

import kvq_codecs
from kvq_attention import Batch, Table
from kvq_attention.ops import SCRATCH_BYTES
from kvq_attention.routes import DENSE, Route
from kvq_attention.scoring import Scoring
from kvq_attention.triton.extending import launch, step

TOKENS, REQUESTS = 2048, 2
PACKAGE = launch.__name__.rpartition(".")[0]


@contextmanager
def device(arch: int) -> Iterator[None]:
    """The launcher finds a GPU of that architecture where there is a CPU."""
    level = 0 if arch in AMD else arch
    shared_kib = 64 if arch in AMD else SHARED_KIB[arch]
    with ExitStack() as stack:
        for launcher in launchers():
            stack.enter_context(mock.patch.object(launcher, "ptx_level", lambda _device: level))
        stack.enter_context(
            mock.patch.object(step, "shared_memory", lambda _device: shared_kib << 10)
        )
        yield


def launchers() -> list[ModuleType]:
    """The modules that launch what is compiled for a level of PTX."""
    found = [module for name, module in sys.modules.items() if name.startswith(PACKAGE)]
    return [module for module in found if hasattr(module, "ptx_level")]


def jobs() -> Jobs:
    """By the name of the codec."""
    for codec in kvq_codecs.names():
        yield codec, lambda codec=codec: extend(codec)


def extend(
    k: str,
    v: str | None = None,
    *,
    dim: int = 128,
    columns: int = COLUMNS,
    dtype: torch.dtype = torch.bfloat16,
    scratch_bytes: int | None = None,
    known: bool = False,
    **scoring: Any,
) -> None:
    """Chunks of two requests, over page tables of so many pages of 16 tokens.

    known : whether the host knows their sizes, so that dense kernels take them; scratch_bytes :
    None = none, or if so enough
    """
    heads = HEADS + 2 * KV_HEADS
    fused = torch.empty(TOKENS, heads, dim, dtype=dtype)
    q, new_k, new_v = fused.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    batch = Batch(
        query_offsets=torch.tensor([0, TOKENS // 2, TOKENS], dtype=torch.int32),
        seq_lens=torch.full((REQUESTS,), columns * 16, dtype=torch.int32),
        tables={
            TIER: Table(
                torch.zeros(REQUESTS, columns, dtype=torch.int32),
                torch.zeros(TOKENS, dtype=torch.int64),
            )
        },
        page_tokens=16,
    )
    route = None
    if known:
        batch = replace(batch, host=tuple(batch.requests()))
        route = Route(DENSE)
    if scratch_bytes is None:
        scratch_bytes = SCRATCH_BYTES if known else 0
    caches = cache(k, dim), cache(v or k, dim)
    given = Scoring(dim**-0.5, **scoring)
    launch.extend(q, new_k, new_v, *caches, batch, TIER, given, scratch_bytes, route)
