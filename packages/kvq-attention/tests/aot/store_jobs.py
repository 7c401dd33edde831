"""Launches of the store kernel: every format at head_dim 128, rows as models give them."""

from __future__ import annotations

import torch
from compiling import Jobs

import kvq_codecs
from kvq_attention.triton.store import store
from kvq_codecs import Encoded

TOKENS, HEADS, PAGES, PAGE_TOKENS, DIM = 64, 8, 4, 16, 128


def jobs() -> Jobs:
    """By the name of the codec."""
    for codec in kvq_codecs.names():
        yield codec, lambda codec=codec: _store(codec)


def cache(codec: str, dim: int = DIM) -> Encoded:
    spec = kvq_codecs.get(codec).spec
    lead = PAGES, HEADS, PAGE_TOKENS
    planes = {
        plane.name: torch.empty(*lead, plane.row_items(dim), dtype=getattr(torch, plane.dtype))
        for plane in spec.planes
    }
    return Encoded(spec, dim, planes)


def _store(codec: str) -> None:
    rows = torch.empty(TOKENS, HEADS, DIM, dtype=torch.bfloat16)
    store(rows, rows, cache(codec), cache(codec), torch.empty(TOKENS, dtype=torch.int64))
