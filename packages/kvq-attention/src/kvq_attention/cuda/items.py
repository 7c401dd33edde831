"""How a request is cut into chunks: the sizes that the kernels are compiled with, and a bound."""

from __future__ import annotations

from kvq_attention import chunks

# Part of what decides a result's last bits: they hold for every launch. See `kvq_attention.chunks`.
ALONE = 256
SMALLEST_CHUNK, LARGEST_CHUNK = 128, 1024
CHUNK_STEP = 32  # chunks are multiples of it, and it is one of steps
MOST_CHUNKS = 256  # of longer sequences chunks grow
# Pieces a multiprocessor by which it reads as fast as it can, of packed and of 16-bit caches
FULL_PACKED, FULL_WIDE = 8, 4
TILE = 16  # tokens of a tensor-core product
ROWS = (4, 8, 16)  # query rows that a warp takes at once


def constants() -> dict[str, int]:
    """What source/items.cuh wants to be defined."""
    return {
        "ALONE": ALONE,
        "SMALLEST_CHUNK": SMALLEST_CHUNK,
        "LARGEST_CHUNK": LARGEST_CHUNK,
        "CHUNK_STEP": CHUNK_STEP,
        "MOST_CHUNKS": MOST_CHUNKS,
    }


def wanted(requests: int | None, kv_heads: int, group: int, processors: int, *, wide: bool) -> int:
    """Chunks a request that fill a device, of so many requests a call; None = nobody knows.

    group: query heads a KV head. wide: the cache has 16 bits a value, or more.
    """
    pieces = kv_heads * -(-group // ROWS[-1])
    return chunks.wanted(requests, pieces, (FULL_WIDE if wide else FULL_PACKED) * processors)


def most_chunks(reach: int, window: int | None, queries: int, wanted: int) -> int:
    """Chunks that a request has at most, of `reach` tokens and up to `queries` queries.

    A bound of what `cut` in source/items.cuh counts.
    """
    visible = reach
    if window is not None:  # chunks begin up to a tile before the first visible position
        visible = min(reach, window + queries + TILE)
    sizes = {"alone": ALONE, "smallest": SMALLEST_CHUNK, "largest": LARGEST_CHUNK}
    return chunks.count(visible, wanted, **sizes, most=MOST_CHUNKS)
