"""How a request is cut into chunks: the sizes that the kernels are compiled with, and a bound."""

from __future__ import annotations

from math import isqrt

# Part of what decides a result's last bits: they hold for every launch.
# A request that sees no more tokens is one chunk: where calls have few requests, and many.
ALONE_OF_FEW, ALONE_OF_MANY = 256, 1024
# Many are so many requests × KV heads a multiprocessor, of packed and of 16-bit caches: then enough
# runs of tokens are read at once, and partial results would only cost their way through memory.
FULL_PACKED, FULL_WIDE = 6, 3
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
        "CHUNK_STEP": CHUNK_STEP,
        "SPREAD": SPREAD,
        "SMALLEST_CHUNK": SMALLEST_CHUNK,
        "LARGEST_CHUNK": LARGEST_CHUNK,
        "MOST_CHUNKS": MOST_CHUNKS,
    }


def alone_tokens(requests: int | None, kv_heads: int, processors: int, *, wide: bool) -> int:
    """Tokens of a request that is one chunk, where calls have up to `requests`; None = few.

    wide: the cache has 16 bits a value, or more.
    """
    full = FULL_WIDE if wide else FULL_PACKED
    many = requests is not None and requests * kv_heads >= full * processors
    return ALONE_OF_MANY if many else ALONE_OF_FEW


def most_chunks(reach: int, window: int | None, queries: int, alone: int) -> int:
    """Chunks that a request has at most, of `reach` tokens and up to `queries` queries.

    alone: tokens of a request that is one chunk. A bound of what `cut` in source/items.cuh counts.
    """
    visible = reach
    if window is not None:  # chunks begin up to a tile before the first visible position
        visible = min(reach, window + queries + TILE)
    if visible <= alone:
        return 1
    # Of sequences whose chunks are the smallest, the longest has most.
    small = -(-min(visible, isqrt(SPREAD * SMALLEST_CHUNK)) // SMALLEST_CHUNK)
    return min(max(small, -(-visible // LARGEST_CHUNK)), MOST_CHUNKS)
