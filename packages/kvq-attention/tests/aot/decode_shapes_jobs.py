"""Launches of the decode kernels beyond head_dim 128 and plain scoring, by what is special."""

from __future__ import annotations

import torch
from compiling import Jobs
from decode_jobs import HEADS, decode, device

__all__ = ["device", "jobs"]

SHORT = 8  # pages: one chunk, without a merge


def jobs() -> Jobs:
    sinks = torch.empty(HEADS)
    yield "k=q8_0 v=q4_0", lambda: decode("q8_0", "q4_0")
    yield "k=fp16 v=iso3", lambda: decode("fp16", "iso3")
    yield "k=fp8 v=fp32", lambda: decode("fp8", "fp32")
    yield "window", lambda: decode("q4_0", window=2000)
    yield "softcap and sinks", lambda: decode("fp8_e4m3", softcap=30.0, sinks=sinks)
    yield "short, with sinks", lambda: decode("q6_0", columns=SHORT, sinks=sinks)
    yield "any cut", lambda: decode("nvfp4", columns=SHORT, any_cut=True)
    yield "any cut of a window", lambda: decode("iso3", window=2000, any_cut=True, sinks=sinks)
    yield "bf16, fp16 queries", lambda: decode("bf16", dtype=torch.float16)
    yield "fp16, head_dim 80", lambda: decode("fp16", dim=80)
    for codec in ("q8_0", "nvfp4"):
        yield f"{codec}, head_dim 64", lambda codec=codec: decode(codec, dim=64)
    for codec in ("fp32", "q8_0", "iso3"):
        yield f"{codec}, head_dim 256", lambda codec=codec: decode(codec, dim=256)
