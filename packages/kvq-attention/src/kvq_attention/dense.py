"""Attention of one request over rows that lie in one piece, by torch's own kernels.

They give log-sum-exp beside the output, by which results over parts of the keys are joined.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

# q [Hq, n, D], k and v [Hkv, m, D], causal, scale → the output [Hq, n, D] and natural logs [Hq, n]
Attend = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, bool, float], tuple[torch.Tensor, torch.Tensor]
]

HALVES = (torch.float16, torch.bfloat16)
# head_dims of each kernel: multiples of 8 up to
CUDNN_DIM, FLASH_DIM = 128, 256
# Rows of a trial: what a library compiles for sizes of that alignment serves others, too.
TRIED = 256


@dataclass(frozen=True, slots=True)
class Dense:
    """A dense kernel.

    Attributes
    ----------
    name : torch's name of it
    attend : q [Hq, n, D] over k and v [Hkv, m, D], Hq a multiple of Hkv; causal: query i sees keys
        up to the i-th
    """

    name: str
    attend: Attend


@cache
def fastest(device: torch.device, dtype: torch.dtype, dim: int) -> Dense | None:
    """The kernel that is the fastest of those that work; None: none does.

    cuDNN's is up to twice as fast as FlashAttention 2 on compute capability 9.0; whether it has a
    plan for these sizes is known when it is tried.
    """
    if device.type == "cpu":
        return Dense("flash_for_cpu", _flash_for_cpu)
    if dtype not in HALVES or dim % 8:
        return None
    found = [("cudnn", _cudnn, CUDNN_DIM), ("flash", _flash, FLASH_DIM)]
    return next(
        (
            Dense(name, attend)
            for name, attend, most in found
            if dim <= most and _works(attend, device, dtype, dim)
        ),
        None,
    )


def _works(attend: Attend, device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    rows = torch.zeros(2, TRIED, dim, dtype=dtype, device=device)
    try:
        for causal in (False, True):
            attend(rows, rows[:1], rows[:1], causal, 1.0)
    except RuntimeError:  # no kernel, or no plan, for such a device
        return False
    return True


def _cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q[None], k[None], v[None], None, True, 0.0, causal, False, scale=scale
    )
    return out[0], lse.reshape(q.shape[:2]).contiguous()


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        q[None], k[None], v[None], 0.0, causal, False, scale=scale
    )
    return out[0], lse[0].contiguous()


def _flash_for_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    group = q.shape[0] // k.shape[0]
    k, v = (rows.repeat_interleave(group, 0)[None] for rows in (k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q[None], k, v, 0.0, causal, scale=scale
    )
    return out[0], lse[0].contiguous()
