"""What the encoders of the formats share: values in, scales, packed items out.

An encoder is a jit function (source, step, live, planes, table, DIM, BF16) that reads DIM values
of each row, writes its items and returns nothing:

- source : pointers [rows] to the rows' first values, which lie `step` items apart
- live : [rows], the rows that exist; nothing of the others may be read or written
- planes : a tuple of pointers [rows] to the rows' first items, in the order of the spec's planes
- table : what `Encoder.table` gave
- BF16 : the source holds the bits of bf16

A tile holds rows × the next power of two of DIM values; those beyond DIM are 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kvq_attention.triton.rounding import (
    INFINITY_BITS,
    LARGEST_FP16,
    divide,
    magnitude_bits,
    to_half,
)
from kvq_codecs import blocks

BLOCK = tl.constexpr(blocks.BLOCK)
SMALLEST_AMAX = tl.constexpr(blocks.SMALLEST_AMAX)


@dataclass(frozen=True, slots=True)
class Encoder:
    """What the store kernel knows of a format.

    Attributes
    ----------
    encode : the jit function
    serial : a thread walks through a whole row, so a program has a row for each of its threads
    table : device → a tensor of constants that `encode` reads
    """

    encode: Any
    serial: bool = False
    table: Callable[[torch.device], torch.Tensor] | None = None


@triton.jit
def as_float32(raw, BF16: tl.constexpr):
    """Loaded values as float32, exactly; BF16 = `raw` holds the bits of bf16."""
    if BF16:
        return (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return raw.to(tl.float32)


@triton.jit
def load_values(rows, step, live, DIM: tl.constexpr, BF16: tl.constexpr):
    """Values float32 [rows, columns] of rows that start at `rows` and lie `step` items apart."""
    column = tl.arange(0, triton.next_power_of_2(DIM))
    mask = live[:, None] & (column < DIM)[None, :]
    raw = tl.load(rows[:, None] + column[None, :].to(tl.int64) * step, mask=mask, other=0)
    return as_float32(raw, BF16)


@triton.jit
def store_items(rows, items, live, COUNT: tl.constexpr):
    """Write the first COUNT items of each row of a tile."""
    column = tl.arange(0, items.shape[1])
    mask = live[:, None] & (column < COUNT)[None, :]
    tl.store(rows[:, None] + column[None, :], items, mask=mask)


@triton.jit
def split_blocks(values, SIZE: tl.constexpr):
    """[rows, columns] → [rows, blocks, SIZE]."""
    return tl.reshape(values, (values.shape[0], values.shape[1] // SIZE, SIZE))


@triton.jit
def join_blocks(values):
    """[rows, blocks, size] → [rows, columns]."""
    return tl.reshape(values, (values.shape[0], values.shape[1] * values.shape[2]))


@triton.jit
def block_quotients(values, LARGEST: tl.constexpr):
    """Blocks of 32 over their stored scale, fp16(amax / LARGEST): `kvq_codecs.blocks.quotients`.

    Returns quotients float32 [rows, blocks, 32], +0 where a block's codes are all 0, and scales
    fp16 [rows, blocks].
    """
    split = split_blocks(values, BLOCK)
    top = tl.max(magnitude_bits(split), 2)
    finite = top < INFINITY_BITS
    amax = tl.where(finite, top, 0).to(tl.float32, bitcast=True)
    exact = tl.div_rn(amax, tl.full(amax.shape, LARGEST, tl.float32))
    scale = to_half(tl.minimum(exact, LARGEST_FP16), ~finite)
    step = scale.to(tl.float32)
    alive = finite & (step > 0)
    numerator = tl.where(alive[:, :, None], split, 0.0)
    return divide(numerator, tl.where(alive, step, 1.0)[:, :, None]), scale


@triton.jit
def row_scale(top, LARGEST: tl.constexpr):
    """max(amax, 1e-10) / LARGEST of rows whose largest magnitude has the bits `top`.

    Returns the scales float32 [rows], those of rows that are not finite being of no use, and
    which rows are finite.
    """
    finite = top < INFINITY_BITS
    amax = tl.where(finite, top, 0).to(tl.float32, bitcast=True)
    scale = tl.div_rn(tl.maximum(amax, SMALLEST_AMAX), tl.full(amax.shape, LARGEST, tl.float32))
    return scale, finite


@triton.jit
def pack_nibbles(codes):
    """Codes int32 [rows, n], of which the low four bits count → bytes [rows, n / 2], first low."""
    pairs = tl.reshape(codes, (codes.shape[0], codes.shape[1] // 2, 2))
    low, high = tl.split(pairs)
    return ((low & 15) | (high << 4)).to(tl.uint8)


@triton.jit
def pack_crumbs(codes):
    """Codes int32 [rows, n], of which the low two bits count → bytes [rows, n / 4], first low."""
    pairs = tl.reshape(codes, (codes.shape[0], codes.shape[1] // 4, 2, 2))
    even, odd = tl.split(pairs)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    low = (first & 3) | ((second & 3) << 2)
    return (low | ((third & 3) << 4) | (fourth << 6)).to(tl.uint8)
