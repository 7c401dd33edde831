"""Attention in float64, by torch's own kernel where it has the feature, else by the formula."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    device: str = "cpu",
) -> torch.Tensor:
    """The last n of S positions attend: q [n, Hq, D], k [S, Hkv, D], v [S, Hkv, Dv]."""
    q, k, v = (x.to(device).double().transpose(0, 1) for x in (q, k, v))
    n, size = q.shape[1], k.shape[1]
    key = torch.arange(size, device=device)
    query = key[size - n :, None]
    visible = key <= query
    if window is not None:
        visible &= query - key < window
    if softcap is None and sinks is None:
        # enable_gqa: query head h reads KV head h // (Hq / Hkv)
        out = scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=visible, scale=scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)
    group = q.shape[0] // k.shape[0]
    heads = [
        _head(q[h], k[h // group], v[h // group], visible, scale, softcap, _sink(sinks, h, q))
        for h in range(q.shape[0])
    ]
    return torch.stack(heads, dim=1)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest ‖Δ‖ / ‖expected‖ over tokens and heads of [T, H, D]; NaN counts as infinite."""
    expected = expected.cpu().double()
    error = (out.cpu().double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float(error.nan_to_num(nan=torch.inf).max())


def _sink(sinks: torch.Tensor | None, head: int, like: torch.Tensor) -> torch.Tensor | None:
    return None if sinks is None else sinks[head].to(like)


def _head(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    softcap: float | None,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    logits = scale * (q @ k.T)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = torch.where(visible, logits, -torch.inf)
    if sink is not None:
        logits = torch.cat([logits, sink.expand(len(q), 1)], dim=1)
    return logits.softmax(dim=1)[:, : len(k)] @ v
