"""Launches around dense kernels beyond head_dim 128 and one part, by what is special."""

from __future__ import annotations

from typing import Any

import torch
from compiling import Jobs
from decode_jobs import HEADS
from extend_dense_jobs import device
from extend_jobs import extend

__all__ = ["device", "jobs"]

# The bound holds parts of one head's past.
IN_PARTS: dict[str, Any] = {"scratch_bytes": 8 << 20, "columns": 4096, "known": True}


def jobs() -> Jobs:
    sinks = torch.empty(HEADS)
    yield "k=q8_0 v=q4_0, parts, sinks", lambda: extend("q8_0", "q4_0", sinks=sinks, **IN_PARTS)
    yield "bf16, parts", lambda: extend("bf16", **IN_PARTS)
    yield "q4_0, float32 queries", lambda: extend("q4_0", dtype=torch.float32, known=True)
    for codec, dim in (("nvfp4", 64), ("q8_0", 256), ("iso3", 256)):
        yield f"{codec}, head_dim {dim}", lambda c=codec, d=dim: extend(c, dim=d, known=True)
