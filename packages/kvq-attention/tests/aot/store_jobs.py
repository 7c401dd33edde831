"""Launches of the store kernel to compile: every format, and two at a time."""

from __future__ import annotations

import torch
from compiling import Jobs

import kvq_codecs
from kvq_attention.triton.store import store
from kvq_codecs import Encoded

TOKENS, HEADS, PAGES, PAGE_TOKENS, DIM = 4096, 8, 256, 16, 128


def jobs() -> Jobs:
    """bf16 rows at head_dim 128, as a model gives them."""
    for codec in kvq_codecs.names():
        yield codec, lambda codec=codec: call(codec, codec)


def call(k: str, v: str, dim: int = DIM, dtype: torch.dtype = torch.bfloat16) -> None:
    rows = torch.empty(TOKENS, HEADS, dim, dtype=dtype)
    store(rows, rows, cache(k, dim), cache(v, dim), torch.empty(TOKENS, dtype=torch.int64))


def cache(codec: str, dim: int) -> Encoded:
    spec = kvq_codecs.get(codec).spec
    lead = PAGES, HEADS, PAGE_TOKENS
    return Encoded(
        spec,
        dim,
        {
            p.name: torch.empty(*lead, p.row_items(dim), dtype=getattr(torch, p.dtype))
            for p in spec.planes
        },
    )
