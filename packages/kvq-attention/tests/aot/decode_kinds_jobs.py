"""Launches of the decode kernels for the codecs that take most registers: head_dim 128."""

from __future__ import annotations

from compiling import Jobs
from decode_jobs import decode, device

__all__ = ["device", "jobs"]


def jobs() -> Jobs:
    """By the name of the codec."""
    for codec in ("fp8_e4m3", "nvfp4", "iso3", "iso4"):
        yield codec, lambda codec=codec: decode(codec)
