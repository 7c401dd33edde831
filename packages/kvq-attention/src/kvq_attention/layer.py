"""The layer whose attention is tried, and what it must give."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from kvq_attention.errors import TensorError

STEP_TOKENS = 3  # the last ones of a request, that an extend takes as its step's own

# Far beyond any model's; a trial also takes memory for a few dozen pages of all heads.
MOST = {"heads": 4096, "kv_heads": 4096, "head_dim": 65_536, "page_tokens": 65_536}
MOST_VALUES = 1 << 23  # heads · head_dim · page_tokens: 64 MiB in float64
SMALL_VALUES = 1 << 17  # a trial of so many takes about a second on a slow CPU

# What a model has is often wider than a trial's requests and larger than its scores: it would
# change nothing that could be seen.
WINDOW_BEYOND_PAGE = 3  # tokens
LARGEST_SOFTCAP = 1.0


@dataclass(frozen=True, slots=True)
class Layer:
    """The shape of what is tried.

    Attributes
    ----------
    heads, kv_heads : query heads, key/value heads
    head_dim : values a row
    page_tokens : tokens a page
    window, softcap : as in `Scoring`; a trial's own are no larger than its few tokens can show
    sinks : whether each query head has a logit of its own in the softmax's denominator
    queries : most query tokens of a request in a decode
    any_cut : whether such a decode is of a `Batch.any_cut`
    """

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_tokens: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    queries: int = 1
    any_cut: bool = False

    def __str__(self) -> str:
        """In words: `32/8x128, pages of 16, window 512`."""
        return ", ".join(
            [
                f"{self.heads}/{self.kv_heads}x{self.head_dim}",
                f"pages of {self.page_tokens}",
                *([f"window {self.window}"] if self.window is not None else []),
                *([f"soft cap {self.softcap:g}"] if self.softcap is not None else []),
                *(["sinks"] if self.sinks else []),
                *([f"{self.queries} query tokens"] if self.queries > 1 else []),
            ]
        )

    def __post_init__(self) -> None:
        sizes = (self.heads, self.kv_heads, self.head_dim, self.page_tokens)
        if min(sizes) < 1 or self.heads % self.kv_heads:
            raise TensorError(
                "heads, kv_heads, head_dim and page_tokens must be at least 1 and heads a multiple "
                f"of kv_heads, got {self}"
            )
        for name, most in MOST.items():
            if getattr(self, name) > most:
                raise TensorError(f"{name} must be at most {most:,}, got {getattr(self, name):,}")
        if not 1 <= self.queries <= STEP_TOKENS:
            raise TensorError(f"queries must be 1 … {STEP_TOKENS} in a trial, got {self.queries}")

    @property
    def features(self) -> frozenset[str]:
        """What its attention needs beside the plain form, as SUPPORT names it."""
        needs = {
            "gqa": self.heads != self.kv_heads,
            "window": self.window is not None,
            "softcap": self.softcap is not None,
            "sinks": self.sinks,
        }
        return frozenset(name for name, needed in needs.items() if needed)

    def scoring(self) -> dict[str, Any]:
        """Scale, window and soft cap of its trial."""
        n = self.page_tokens
        widest = max(1, min(n + WINDOW_BEYOND_PAGE, 3 * n - 2))
        return {
            "scale": self.head_dim**-0.5,
            "window": self.window and min(self.window, widest),
            "softcap": self.softcap and min(self.softcap, LARGEST_SOFTCAP),
        }

    def small(self, most: int = SMALL_VALUES) -> Layer:
        """The same with fewer KV heads, if it takes that to have at most so many values."""
        each = self.values // self.kv_heads
        kv_heads = max(1, min(self.kv_heads, most // each))
        return replace(self, heads=self.heads // self.kv_heads * kv_heads, kv_heads=kv_heads)

    @property
    def values(self) -> int:
        """Values of a page, were there as many KV heads as query heads."""
        return self.heads * self.head_dim * self.page_tokens


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One query token q [Hq, D], the last of k [L, Hkv, D], v: float64 [Hq, D]."""
    group = q.shape[0] // k.shape[1]
    if window is not None:
        k, v = k[-window:], v[-window:]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = scale * torch.einsum("hd,lhd->hl", q, k)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if sinks is not None:
        scores = torch.cat([scores, sinks.cpu().double()[:, None]], dim=-1)
    weights = scores.softmax(dim=-1)[:, : len(k)]
    return torch.einsum("hl,lhd->hd", weights, v)
