"""Launches of the extend kernels: every format at head_dim 128, a chunk over a long past."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from compiling import AMD, Jobs
from decode_jobs import COLUMNS, HEADS, KV_HEADS, SHARED_KIB, TIER
from store_jobs import cache

import kvq_codecs
from kvq_attention import Batch, Table
from kvq_attention.scoring import Scoring
from kvq_attention.triton.extending import launch, scratch, step

TOKENS, REQUESTS = 2048, 2


@contextmanager
def device(arch: int) -> Iterator[None]:
    """The launcher finds a GPU of that architecture where there is a CPU."""
    level = 0 if arch in AMD else arch
    shared_kib = 64 if arch in AMD else SHARED_KIB[arch]
    with (
        mock.patch.object(step, "ptx_level", lambda _device: level),
        mock.patch.object(scratch, "ptx_level", lambda _device: level),
        mock.patch.object(step, "shared_memory", lambda _device: shared_kib << 10),
    ):
        yield


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
    scratch_bytes: int = 0,
    **scoring: Any,
) -> None:
    """Chunks of two requests, over page tables of so many pages of 16 tokens."""
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
    caches = cache(k, dim), cache(v or k, dim)
    given = Scoring(dim**-0.5, **scoring)
    launch.extend(q, new_k, new_v, *caches, batch, TIER, given, scratch_bytes)
