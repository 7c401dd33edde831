"""Launches of extend's kernels around dense ones: every format at head_dim 128, sizes known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import extend_jobs
import torch
from compiling import Jobs
from extend_jobs import extend

import kvq_codecs
from kvq_attention.dense import Dense
from kvq_attention.triton.extending import dense

CODECS = [name for name in kvq_codecs.names() if name != "fp32"]  # which goes elsewhere


def jobs() -> Jobs:
    """By the name of the codec."""
    for codec in CODECS:
        yield codec, lambda codec=codec: extend(codec, known=True)


@contextmanager
def device(arch: int) -> Iterator[None]:
    """As for the other kernels; torch's are there and compute nothing."""

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)

    with (
        extend_jobs.device(arch),
        mock.patch.object(dense, "fastest", lambda *_: Dense("none", attend)),
    ):
        yield
