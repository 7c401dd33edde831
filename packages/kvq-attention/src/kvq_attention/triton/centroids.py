"""iso's encoder: turned groups of four, nearest centroids, sums in the reference's order.

A thread's span is a block of 128 values, since the sums run from a block's first value to its last:
see `kvq_codecs.rotation`. The values are read twice, for a thread's registers do not hold them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import triton.language as tl

from kvq_attention.triton.encode import PART, load_part, store_bytes
from kvq_attention.triton.jit import jit
from kvq_attention.triton.rounding import to_half
from kvq_codecs import rotation

BLOCK = tl.constexpr(rotation.BLOCK)
SMALLEST_NORM = tl.constexpr(rotation.SMALLEST_NORM)
Floats = npt.NDArray[np.float32]
Levels = tuple[float, tuple[float, ...], tuple[float, ...], tuple[float, ...]]

# Parts of a chunk fill whole words of every plane.
CHUNK = tl.constexpr(32)


def largest(centroids: Floats) -> float:
    """Of a value turned back: four centroids' length, should one value have all of it."""
    return 2 * float(np.abs(centroids).max())


def levels(centroids: Floats, thresholds: Floats) -> Levels:
    """A format's tables as distances from the middle threshold, nearest first.

    Returns the middle threshold; the thresholds above it, which t passes if t > upper; those below,
    which t passes if not −t <= lower; the squares of the centroids, which lie symmetrically, so
    that they depend on the distance alone.
    """
    half = len(centroids) // 2
    squares = centroids * centroids
    if list(squares) != list(squares[::-1]):
        raise ValueError(f"centroids must lie symmetrically about 0, got {centroids}")
    # −t is at least −T if and only if it is above the next number below −T.
    lower = np.nextafter(-thresholds[: half - 1][::-1], np.float32(-np.inf))
    return (
        float(thresholds[half - 1]),
        tuple(map(float, thresholds[half:])),
        tuple(map(float, lower)),
        tuple(map(float, squares[half:])),
    )


@jit
def split_part(values):
    """[rows, 8] → eight [rows], in order."""
    even, odd = tl.split(tl.reshape(values, (values.shape[0], 2, 2, 2)))
    v04, v26 = tl.split(even)
    v15, v37 = tl.split(odd)
    v0, v4 = tl.split(v04)
    v1, v5 = tl.split(v15)
    v2, v6 = tl.split(v26)
    v3, v7 = tl.split(v37)
    return v0, v1, v2, v3, v4, v5, v6, v7


@jit
def add_in_order(total, values):
    """total + values[:, 0] + … + values[:, 7], from left to right."""
    parts = split_part(values)
    for i in tl.static_range(PART):
        total = total + parts[i]
    return total


@jit
def split_groups(values):
    """[rows, 8] → the first, second, third and fourth of each group of four, [rows, 2] each."""
    even, odd = tl.split(tl.reshape(values, (values.shape[0], 2, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@jit
def turn_part(values, quaternions):
    """Left product of each group of four with its quaternion, [rows, 8] both."""
    a, b, c, d = split_groups(values)
    w, x, y, z = split_groups(quaternions)
    t0 = w * a - x * b - y * c - z * d
    t1 = w * b + x * a + y * d - z * c
    t2 = w * c - x * d + y * a + z * b
    t3 = w * d + x * c - y * b + z * a
    return tl.reshape(tl.join(tl.join(t0, t2), tl.join(t1, t3)), values.shape)


@jit
def nearest(values, LEVELS: tl.constexpr):
    """Number of thresholds below each value, int32, and the square of that centroid.

    A NaN is above none, as if it were −infinity.
    """
    COUNT: tl.constexpr = len(LEVELS[1])
    is_upper = values > LEVELS[0]
    distance = tl.where(is_upper, values, -values)
    # From the middle outward: COUNT + 1 + passed, or COUNT - passed.
    start = tl.where(is_upper, COUNT + 1, COUNT)
    passed = tl.zeros(values.shape, tl.int32)
    square = tl.full(values.shape, LEVELS[3][0], tl.float32)
    for i in tl.static_range(COUNT):
        has_passed = ~(distance <= tl.where(is_upper, LEVELS[1][i], LEVELS[2][i]))
        passed = tl.where(has_passed, i + 1, passed)
        square = tl.where(has_passed, LEVELS[3][i + 1], square)
    return start ^ passed, square


@jit
def encode_turned(
    source,
    step,
    inside,
    live,
    planes,
    span,
    table,
    PACK: tl.constexpr,
    LEVELS: tl.constexpr,
    BF16: tl.constexpr,
):
    """Encode blocks of 128 values, a thread each.

    PACK(indices) makes bytes of indices int32 [spans, 8]: a tuple of uint8 [spans, n], one for each
    plane but the last, which is that of the scales.
    """
    CODES: tl.constexpr = len(planes) - 1
    quads = table + tl.broadcast_to(tl.arange(0, PART)[None, :], (source.shape[0], PART))
    total = tl.zeros(source.shape, tl.float32)
    for chunk in range(BLOCK // CHUNK):
        for i in tl.static_range(CHUNK // PART):
            x = load_part(source, step, inside, chunk * CHUNK + i * PART, PART, BF16)
            total = add_in_order(total, x * x)
    norm = tl.sqrt_rn(total)
    is_long = norm > SMALLEST_NORM
    one = tl.full(norm.shape, 1.0, tl.float32)
    inverse = tl.where(is_long, tl.div_rn(one, tl.where(is_long, norm, one)), 0.0)
    total = tl.zeros(source.shape, tl.float32)
    for chunk in range(BLOCK // CHUNK):
        packed = ()
        for i in tl.static_range(CHUNK // PART):
            first = chunk * CHUNK + i * PART
            x = load_part(source, step, inside, first, PART, BF16)
            turned = turn_part(x * inverse[:, None], tl.load(quads + first))
            indices, squares = nearest(turned, LEVELS)
            total = add_in_order(total, squares)
            packed = packed + PACK(indices)
        for plane in tl.static_range(CODES):
            parts = ()
            for i in tl.static_range(CHUNK // PART):
                parts = parts + (packed[i * CODES + plane],)
            store_bytes(planes[plane], span * (BLOCK // CHUNK) + chunk, parts, live)
    scale = tl.div_rn(norm, tl.sqrt_rn(total))
    tl.store(planes[CODES] + span, to_half(scale, scale != scale), mask=live)
