"""Launches around dense kernels for a codec of each kind: head_dim 128."""

from __future__ import annotations

from compiling import Jobs
from extend_dense_jobs import device
from extend_jobs import extend

__all__ = ["device", "jobs"]


def jobs() -> Jobs:
    """By the name of the codec."""
    for codec in ("bf16", "q4_0", "fp8", "iso3"):
        yield codec, lambda codec=codec: extend(codec, known=True)
