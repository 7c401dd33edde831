"""How a store is cut into programs and threads: pure functions of formats and sizes."""

from __future__ import annotations

from dataclasses import dataclass

from kvq_attention.errors import UnsupportedError
from kvq_attention.triton.encode import Encoder
from kvq_attention.triton.tiles import power_of_two

WARP = 32


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program encodes: rows of some tokens and heads, powers of two, in spans."""

    tokens: int
    heads: int
    span: int


@dataclass(frozen=True, slots=True)
class Config:
    """How a launch is cut: the tiles of K and of V, and the warps of a program."""

    k: Tile
    v: Tile
    num_warps: int


def pick_config(k: Encoder, v: Encoder, k_dim: int, v_dim: int, num_heads: int) -> Config:
    """The launch for two formats; `UnsupportedError` where threads cannot share a row evenly."""
    num_warps = 4
    k_tile, v_tile = (
        pick_tile(encoder, dim, num_heads, num_warps * WARP)
        for encoder, dim in ((k, k_dim), (v, v_dim))
    )
    return Config(k_tile, v_tile, num_warps)


def pick_tile(encoder: Encoder, dim: int, num_heads: int, threads: int) -> Tile:
    """The tile that gives each thread one span.

    Where a thread has a whole row, the heads of a token are read together, so that what the
    threads of a warp read lies close together.
    """
    span = next((size for size in encoder.spans if dim % size == 0), None)
    if span is None:
        raise UnsupportedError(
            f"the triton backend stores head_dims that {encoder.spans[-1]} divides, not {dim}; the "
            "reference backend stores every head_dim of the codec"
        )
    row_spans = power_of_two(dim // span)
    rows = max(1, threads // row_spans)
    heads = min(num_heads & -num_heads, rows) if row_spans == 1 else 1
    return Tile(rows // heads, heads, span)
