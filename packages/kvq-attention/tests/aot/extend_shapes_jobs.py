"""Launches of the extend kernels beyond head_dim 128 and plain scoring, by what is special."""

from __future__ import annotations

from unittest import mock

import torch
from compiling import Jobs
from decode_jobs import COLUMNS, HEADS
from extend_jobs import device, extend

from kvq_attention.triton.extending import routes

__all__ = ["device", "jobs"]


def jobs() -> Jobs:
    sinks = torch.empty(HEADS)
    yield "k=q8_0 v=q4_0", lambda: extend("q8_0", "q4_0")
    yield "window", lambda: extend("q4_0", window=2000)
    yield "softcap and sinks", lambda: extend("fp8_e4m3", softcap=30.0, sinks=sinks)
    yield "bf16, fp16 queries", lambda: extend("bf16", dtype=torch.float16)
    yield "fp16, head_dim 80", lambda: extend("fp16", dim=80)
    for codec in ("q8_0", "nvfp4"):
        yield f"{codec}, head_dim 64", lambda codec=codec: extend(codec, dim=64)
    for codec in ("fp32", "q8_0", "iso3"):
        yield f"{codec}, head_dim 256", lambda codec=codec: extend(codec, dim=256)
    yield "scratch", through
    yield "scratch, parts", lambda: through(columns=4096, scratch_bytes=8 << 20)
    yield "scratch of K", lambda: through("q8_0", "bf16")
    yield "scratch of V", lambda: through("bf16", "q4_0")


def through(
    k: str = "iso4", v: str = "fp8", *, columns: int = COLUMNS, scratch_bytes: int = 128 << 20
) -> None:
    """Everything that is packed goes through a scratch."""
    with mock.patch.object(routes, "BREAK_EVEN", 1):
        extend(k, v, columns=columns, scratch_bytes=scratch_bytes)
