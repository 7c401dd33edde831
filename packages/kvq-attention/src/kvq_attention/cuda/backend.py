"""What `kvq_attention.ops` calls of this backend."""

from __future__ import annotations

import torch

from kvq_attention.batch import Batch
from kvq_attention.cuda import arguments
from kvq_attention.cuda.decode import check, decode
from kvq_attention.cuda.module import unavailable
from kvq_attention.errors import AttentionError
from kvq_attention.scoring import Scoring
from kvq_codecs import Encoded

__all__ = ["decode", "refusal", "unavailable"]


def refusal(
    q: torch.Tensor,
    k_cache: Encoded,
    v_cache: Encoded,
    batch: Batch,
    tier: str,
    scoring: Scoring,
) -> str | None:
    """Why `decode` would refuse a call of these layouts, dtypes and batch; None if it would not."""
    try:
        check(q, k_cache, v_cache, batch)
        for cache in (k_cache, v_cache):
            arguments.cache(cache)
    except AttentionError as error:
        return str(error)
    return None
