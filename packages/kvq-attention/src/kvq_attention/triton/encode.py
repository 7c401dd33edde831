"""What the encoders of the formats share: values in, scales, packed items out.

A thread encodes SPAN neighbouring values of a row, a span, so the chain of index arithmetic is
paid once for many values, scales need few exchanges between threads, and all tensors have the
layout that their loads and stores want. Values are held in parts of up to eight: 16 bytes of a
16-bit source.

An encoder is a jit function (source, step, inside, live, planes, span, table, DIM, SPAN, BF16)
that reads a span of values per thread, writes their items and returns nothing:

- source : pointers [spans] to the spans' first values, which lie `step` items apart
- inside : [spans], those that exist in the source; no other may be read
- live : [spans], those that are to be written; the threads of a row agree
- planes : a tuple of pointers [spans] to the first items of the spans' rows, in the spec's order
- span : int32 [spans], position of the span in its row; a row has the next power of two of
  DIM / SPAN of them, neighbours in all these tensors
- table : what `Encoder.table` gave
- BF16 : the source holds the bits of bf16
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from kvq_attention.triton.jit import jit
from kvq_attention.triton.rounding import (
    INFINITY_BITS,
    LARGEST_FP16,
    divide,
    magnitude_bits,
    to_half,
)
from kvq_codecs import blocks

PART = tl.constexpr(8)
SMALLEST_AMAX = tl.constexpr(blocks.SMALLEST_AMAX)


@dataclass(frozen=True, slots=True)
class Encoder:
    """What the store kernel knows of a format.

    Attributes
    ----------
    encode : the jit function
    spans : values that a thread may encode; the first that divides head_dim is taken
    table : device → a tensor of constants that `encode` reads
    max_registers : of a thread; None leaves it to the compiler, which may spill to save some
    """

    encode: Any
    spans: tuple[int, ...]
    table: Callable[[torch.device], torch.Tensor] | None = None
    max_registers: int | None = None


@jit
def load_part(source, step, inside, first, SIZE: tl.constexpr, BF16: tl.constexpr):
    """Values first … first + SIZE - 1 of each span as float32 [spans, SIZE], exactly."""
    column = (tl.arange(0, SIZE) + first).to(tl.int64)[None, :]
    raw = tl.load(source[:, None] + column * step, mask=inside[:, None], other=0)
    if BF16:
        return (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return raw.to(tl.float32)


@jit
def load_parts(source, step, inside, SPAN: tl.constexpr, BF16: tl.constexpr):
    """The values of each span: a tuple of float32 [spans, PART]."""
    parts = ()
    for i in tl.static_range(SPAN // PART):
        parts = parts + (load_part(source, step, inside, i * PART, PART, BF16),)
    return parts


@jit
def store_items(rows, first, items, live):
    """Write items [spans, n] from item `first` (an int or int32 [spans]) of each row on."""
    column = tl.arange(0, items.shape[1])[None, :]
    tl.store((rows + first)[:, None] + column, items, mask=live[:, None])


@jit
def concatenate(left, right):
    """[spans, n] and [spans, n] → [spans, 2n]."""
    both = tl.permute(tl.join(left, right), (0, 2, 1))
    return tl.reshape(both, (left.shape[0], 2 * left.shape[1]))


@jit
def store_bytes(rows, span, parts, live):
    """Write each span's bytes, uint8 [spans, n] a part, side by side, sixteen at a time at most."""
    COUNT: tl.constexpr = len(parts)
    WIDTH: tl.constexpr = parts[0].shape[1]
    if COUNT == 1:
        store_items(rows, span * WIDTH, parts[0], live)
    elif COUNT * WIDTH <= 16:
        first = concatenate(parts[0], parts[1])
        if COUNT == 4:
            first = concatenate(first, concatenate(parts[2], parts[3]))
        store_items(rows, span * (COUNT * WIDTH), first, live)
    else:
        for i in tl.static_range(COUNT // 2):
            pair = concatenate(parts[2 * i], parts[2 * i + 1])
            store_items(rows, span * (COUNT * WIDTH) + i * 2 * WIDTH, pair, live)


@jit
def top_bits(parts):
    """Bits of each span's largest magnitude, int32 [spans]."""
    top = tl.max(magnitude_bits(parts[0]), 1)
    for i in tl.static_range(1, len(parts)):
        top = tl.maximum(top, tl.max(magnitude_bits(parts[i]), 1))
    return top


@jit
def top_of_rows(top, ROW: tl.constexpr):
    """The largest of each row's ROW spans, in each of them."""
    if ROW == 1:
        return top
    rows = tl.reshape(top, (top.shape[0] // ROW, ROW))
    largest = tl.max(rows, 1)[:, None]
    return tl.reshape(tl.broadcast_to(largest, rows.shape), top.shape)


@jit
def block_scale(top, LARGEST: tl.constexpr):
    """Stored scale of blocks of largest magnitude `top`, fp16(amax / LARGEST).

    Returns the scale fp16 [spans], what to divide by, float32, and which blocks have codes other
    than 0. See `kvq_codecs.blocks.quotients`.
    """
    finite = top < INFINITY_BITS
    amax = tl.where(finite, top, 0).to(tl.float32, bitcast=True)
    exact = tl.div_rn(amax, tl.full(amax.shape, LARGEST, tl.float32))
    scale = to_half(tl.minimum(exact, LARGEST_FP16), ~finite)
    step = scale.to(tl.float32)
    alive = finite & (step > 0)
    return scale, tl.where(alive, step, 1.0), alive


@jit
def row_scale(top, LARGEST: tl.constexpr):
    """max(amax, 1e-10) / LARGEST of rows of largest magnitude `top`, and which are finite.

    Scales float32 [spans]; those of rows that are not finite are of no use.
    """
    finite = top < INFINITY_BITS
    amax = tl.where(finite, top, 0).to(tl.float32, bitcast=True)
    amax = tl.maximum(amax, SMALLEST_AMAX)
    return tl.div_rn(amax, tl.full(amax.shape, LARGEST, tl.float32)), finite


@jit
def quotients(part, step, alive):
    """A part [spans, n] over step [spans], +0 where its span is not alive."""
    return divide(tl.where(alive[:, None], part, 0.0), step[:, None])


@jit
def pack_nibbles(codes):
    """Codes int32 [spans, n], of which the low four bits count → bytes [spans, n / 2]."""
    pairs = tl.reshape(codes, (codes.shape[0], codes.shape[1] // 2, 2))
    low, high = tl.split(pairs)
    return ((low & 15) | (high << 4)).to(tl.uint8)


@jit
def pack_crumbs(codes):
    """Codes int32 [spans, n], of which the low two bits count → bytes [spans, n / 4]."""
    pairs = tl.reshape(codes, (codes.shape[0], codes.shape[1] // 4, 2, 2))
    even, odd = tl.split(pairs)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    low = (first & 3) | ((second & 3) << 2)
    return (low | ((third & 3) << 4) | (fourth << 6)).to(tl.uint8)
