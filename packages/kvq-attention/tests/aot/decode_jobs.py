"""Launches of the decode kernels: every format at head_dim 128, as a long step makes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from compiling import Jobs
from store_jobs import cache

import kvq_codecs
from kvq_attention import Batch, Table
from kvq_attention.scoring import Scoring
from kvq_attention.triton import decode as launcher

TIER = "full"
REQUESTS, COLUMNS, HEADS, KV_HEADS = 8, 256, 32, 8
# KiB of shared memory of a multiprocessor (CUDA's programming guide, compute capabilities)
SHARED_KIB = {80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}


@contextmanager
def device(arch: int) -> Iterator[None]:
    """The launcher finds a GPU of that architecture where there is a CPU."""
    found: dict[str, Any] = {
        "ptx_level": lambda _device: arch,
        "shared_memory": lambda _device: SHARED_KIB[arch] << 10,
        "processors": lambda _device: 100,
    }
    with mock.patch.multiple(launcher, **found):
        yield


def jobs() -> Jobs:
    """By the name of the codec."""
    for codec in kvq_codecs.names():
        yield codec, lambda codec=codec: decode(codec)


def decode(
    k: str,
    v: str | None = None,
    *,
    dim: int = 128,
    columns: int = COLUMNS,
    dtype: torch.dtype = torch.bfloat16,
    any_cut: bool = False,
    **scoring: Any,
) -> None:
    """One query token a request, over page tables of so many pages of 16 tokens."""
    q = torch.empty(REQUESTS, HEADS, dim, dtype=dtype)
    batch = Batch(
        query_offsets=torch.arange(REQUESTS + 1, dtype=torch.int32),
        seq_lens=torch.full((REQUESTS,), columns * 16, dtype=torch.int32),
        tables={
            TIER: Table(
                torch.zeros(REQUESTS, columns, dtype=torch.int32),
                torch.zeros(REQUESTS, dtype=torch.int64),
            )
        },
        page_tokens=16,
        any_cut=any_cut,
    )
    caches = cache(k, dim), cache(v or k, dim)
    launcher.decode(q, *caches, batch, TIER, Scoring(dim**-0.5, **scoring))
