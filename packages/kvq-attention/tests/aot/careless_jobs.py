"""A kernel written as one would: what must not be found in a store kernel is found in it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from compiling import Jobs


def jobs() -> Jobs:
    """One launch with Triton's own options."""
    numbers = torch.empty(256)
    yield "careless", lambda: _careless[(1,)](numbers, numbers, 3, 100)


@triton.jit
def _careless(x, y, repeat, SIZE: tl.constexpr):
    index = tl.arange(0, 256)
    a = tl.load(x + index)
    b = tl.load(y + index)
    tl.store(y + index, tl.sqrt(a / b) * a + b)
