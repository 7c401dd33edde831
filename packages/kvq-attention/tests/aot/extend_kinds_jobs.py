"""Launches of the extend kernels for a codec of each kind: head_dim 128."""

from __future__ import annotations

from compiling import Jobs
from extend_jobs import device, extend
from extend_shapes_jobs import through

__all__ = ["device", "jobs"]


def jobs() -> Jobs:
    """By the name of the codec; and what goes through a scratch."""
    for codec in ("bf16", "q4_0", "iso3"):
        yield codec, lambda codec=codec: extend(codec)
    yield "scratch", through
