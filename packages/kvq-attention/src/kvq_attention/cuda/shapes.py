"""How a decode launch is shaped: what a block holds at once. Pure arithmetic on sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvq_attention.cuda.items import TILE

LINES = 8  # query rows that a product takes
THREADS = 32  # of a block
# Blocks that registers hold of 128 values a row and up to 8 query rows
MOST_BLOCKS = 16
# Bytes of a token up to which two tiles a step leave room for as many blocks
TWO_TILES_BYTES = 160
# Planes' rows, limits, the piece and the page table
WALK_BYTES = 8 * 16 + 16 + 40 + 8
# What a block takes of shared memory besides its own
DRIVER_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a launch.

    Attributes
    ----------
    rows : query rows that a block takes at once: 4, 8 or 16
    tiles : of 16 tokens a step
    stages : steps under way
    blocks : that a multiprocessor's registers are to hold
    """

    rows: int
    tiles: int
    stages: int
    blocks: int

    def shared_bytes(self, token_bytes: int, dim: int) -> int:
        """Shared memory of a block, for a token's K and V of `token_bytes` and `dim` values a row.

        As source/walk.cuh lays it out: tiles under way, where the next ones lie, what the walk is
        along, queries or means.
        """
        ring = self.stages * self.tiles * TILE * token_bytes
        addresses = self.tiles * 8 * 8
        queries = self.rows * ((dim + 8) * 2 + 4)
        means = 4 * (dim + 4) * 4
        return -(-(ring + addresses + WALK_BYTES + max(queries, means)) // 16) * 16


def pick(token_bytes: int, dim: int, rows: int, shared_bytes: int) -> Shape:
    """The launch shape for requests of so many query rows a KV head.

    token_bytes : of K and V of one token and KV head; shared_bytes : of a multiprocessor. Raises
    `ValueError` where not even one block fits.
    """
    rows = next((size for size in (4, 8) if rows <= size), 16)
    # The softmax's reference moves once a step at most, so `tiles` decides a result's last bits: it
    # must not depend on the batch.
    tiles = 2 if token_bytes <= TWO_TILES_BYTES else 1
    columns = -(-rows // LINES)
    # Sums take a quarter of a register a value and column, queries an eighth.
    blocks = MOST_BLOCKS * 128 // (columns * max(dim, 128))
    shape = Shape(rows, tiles, 2, blocks)
    taken = shape.shared_bytes(token_bytes, dim) + DRIVER_BYTES
    if taken > shared_bytes:
        raise ValueError(
            f"a block takes {taken} bytes of shared memory for tokens of {token_bytes} bytes; a "
            f"multiprocessor has {shared_bytes}"
        )
    return replace(shape, blocks=min(blocks, shared_bytes // taken))
