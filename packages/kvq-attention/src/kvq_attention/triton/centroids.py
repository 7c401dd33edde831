"""iso's encoder: turned groups of four, nearest centroids, sums in the reference's order.

A thread walks through a whole block of 128 values, eight at a time, for its sums run from the
first value to the last: see `kvq_codecs.rotation`. The values are read twice, since they would not
fit into a thread's registers.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from kvq_attention.triton.encode import as_float32
from kvq_attention.triton.rounding import to_half
from kvq_codecs import rotation

BLOCK = tl.constexpr(rotation.BLOCK)
SMALLEST_NORM = tl.constexpr(rotation.SMALLEST_NORM)
# Values a thread holds at a time; a chunk of several fills whole words of every plane.
STEP = tl.constexpr(8)
CHUNK = tl.constexpr(32)


def floats(table: Any) -> tuple[float, ...]:
    """A NumPy table as constants of a kernel."""
    return tuple(map(float, table))


@triton.jit
def load_step(source, step, live, first, BF16: tl.constexpr):
    """Values first … first + 7 of each row, float32 [rows, 8]."""
    column = (tl.arange(0, STEP) + first).to(tl.int64)[None, :]
    mask = live[:, None] & (column >= 0)
    return as_float32(tl.load(source[:, None] + column * step, mask=mask, other=0), BF16)


@triton.jit
def split_step(values):
    """[rows, 8] → eight [rows], in order."""
    even, odd = tl.split(tl.reshape(values, (values.shape[0], 2, 2, 2)))
    v04, v26 = tl.split(even)
    v15, v37 = tl.split(odd)
    v0, v4 = tl.split(v04)
    v1, v5 = tl.split(v15)
    v2, v6 = tl.split(v26)
    v3, v7 = tl.split(v37)
    return v0, v1, v2, v3, v4, v5, v6, v7


@triton.jit
def add_in_order(total, values):
    """total + values[:, 0] + … + values[:, 7], from left to right."""
    parts = split_step(values)
    for i in tl.static_range(STEP):
        total = total + parts[i]
    return total


@triton.jit
def split_groups(values):
    """[rows, 8] → the first, second, third and fourth of each group of four, [rows, 2] each."""
    even, odd = tl.split(tl.reshape(values, (values.shape[0], 2, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def turn_step(values, quaternions):
    """Left product of each group of four with its quaternion, [rows, 8] both."""
    a, b, c, d = split_groups(values)
    w, x, y, z = split_groups(quaternions)
    t0 = w * a - x * b - y * c - z * d
    t1 = w * b + x * a + y * d - z * c
    t2 = w * c - x * d + y * a + z * b
    t3 = w * d + x * c - y * b + z * a
    return tl.reshape(tl.join(tl.join(t0, t2), tl.join(t1, t3)), values.shape)


@triton.jit
def nearest(values, BITS: tl.constexpr, THRESHOLDS: tl.constexpr, SQUARES: tl.constexpr):
    """Number of thresholds below each value, int32, and the square of that centroid."""
    indices = tl.zeros(values.shape, tl.int32)
    squares = tl.full(values.shape, SQUARES[0], tl.float32)
    for i in tl.static_range((1 << BITS) - 1):
        above = values > THRESHOLDS[i]
        indices += above.to(tl.int32)
        squares = tl.where(above, SQUARES[i + 1], squares)
    return indices, squares


@triton.jit
def store_word(rows, word, live):
    """Write the four bytes of an int32 [rows], as one word where they are aligned."""
    byte = tl.arange(0, 4)
    items = (word[:, None] >> (8 * byte)[None, :]).to(tl.uint8)
    tl.store(rows[:, None] + byte[None, :], items, mask=live[:, None])


@triton.jit
def encode_turned(
    source,
    step,
    live,
    planes,
    scales,
    table,
    WRITE: tl.constexpr,
    BITS: tl.constexpr,
    THRESHOLDS: tl.constexpr,
    SQUARES: tl.constexpr,
    DIM: tl.constexpr,
    BF16: tl.constexpr,
):
    """Encode rows; WRITE(planes, live, chunk, indices) writes a chunk's, four [rows, 8]."""
    column = tl.arange(0, STEP)[None, :]
    quads = table + tl.broadcast_to(column, (source.shape[0], STEP))
    for block in range(DIM // BLOCK):
        total = tl.zeros(source.shape, tl.float32)
        for chunk in range(BLOCK // CHUNK):
            for part in tl.static_range(CHUNK // STEP):
                first = block * BLOCK + chunk * CHUNK + part * STEP
                x = load_step(source, step, live, first, BF16)
                total = add_in_order(total, x * x)
        norm = tl.sqrt_rn(total)
        is_long = norm > SMALLEST_NORM
        one = tl.full(norm.shape, 1.0, tl.float32)
        inverse = tl.where(is_long, tl.div_rn(one, tl.where(is_long, norm, one)), 0.0)
        total = tl.zeros(source.shape, tl.float32)
        for chunk in range(BLOCK // CHUNK):
            indices = ()
            for part in tl.static_range(CHUNK // STEP):
                first = chunk * CHUNK + part * STEP
                x = load_step(source, step, live, block * BLOCK + first, BF16)
                turned = turn_step(x * inverse[:, None], tl.load(quads + first))
                index, square = nearest(turned, BITS, THRESHOLDS, SQUARES)
                total = add_in_order(total, square)
                indices = indices + (index,)
            WRITE(planes, live, block * (BLOCK // CHUNK) + chunk, indices)
        scale = tl.div_rn(norm, tl.sqrt_rn(total))
        tl.store(scales + block, to_half(scale, scale != scale), mask=live)
