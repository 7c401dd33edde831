"""How a request is cut into chunks: the sizes that the kernels are compiled with, and a bound."""

from __future__ import annotations

from math import isqrt

# Part of what decides a result's last bits: they hold for every launch.
ALONE_TOKENS = 1024  # a request that sees no more is one chunk
CHUNK_STEP = 32  # chunks are multiples of it, and it is one of steps
# A chunk is as large a part of its sequence as the sequence is of so many tokens, between the two
# sizes below. A short sequence takes as long as a piece does, so that pieces are to be small; of
# long ones, which fill a GPU, each piece costs as much as its results' way through memory.
SPREAD = 2**17
SMALLEST_CHUNK = 128
LARGEST_CHUNK = 1024
MOST_CHUNKS = 256  # of longer sequences chunks grow
TILE = 16  # tokens of a tensor-core product


def constants() -> dict[str, int]:
    """What source/items.cuh wants to be defined."""
    return {
        "ALONE_TOKENS": ALONE_TOKENS,
        "CHUNK_STEP": CHUNK_STEP,
        "SPREAD": SPREAD,
        "SMALLEST_CHUNK": SMALLEST_CHUNK,
        "LARGEST_CHUNK": LARGEST_CHUNK,
        "MOST_CHUNKS": MOST_CHUNKS,
    }


def most_chunks(reach: int, window: int | None, queries: int) -> int:
    """Chunks that a request has at most, of `reach` tokens and up to `queries` queries.

    A bound of what `cut` in source/items.cuh counts.
    """
    visible = reach
    if window is not None:  # chunks begin up to a tile before the first visible position
        visible = min(reach, window + queries + TILE)
    if visible <= ALONE_TOKENS:
        return 1
    # Of sequences whose chunks are the smallest, the longest has most.
    small = -(-min(visible, isqrt(SPREAD * SMALLEST_CHUNK)) // SMALLEST_CHUNK)
    return min(max(small, -(-visible // LARGEST_CHUNK)), MOST_CHUNKS)
