"""How a decode launch is shaped: what a block holds at once. Pure arithmetic on sizes."""

from __future__ import annotations

from dataclasses import dataclass

from kvq_attention.cuda.items import TILE

LINES = 8  # query rows that a product takes
THREADS = 32  # of a block
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
        along, queries, means.
        """
        ring = self.stages * self.tiles * TILE * token_bytes
        addresses = self.tiles * 8 * 8
        queries = self.rows * ((dim + 8) * 2 + 4)
        means = self.rows * (dim + 4) * 4
        taken = ring + addresses + WALK_BYTES + queries + means
        return -(-taken // 16) * 16


def pick(token_bytes: int, dim: int, rows: int, shared_bytes: int) -> Shape:
    """The launch shape for requests of so many query rows a KV head.

    token_bytes : of K and V of one token and KV head; shared_bytes : of a multiprocessor. Raises
    `ValueError` where not even the smallest fits.
    """
    rows = next((size for size in (4, 8) if rows <= size), 16)
    columns = -(-rows // LINES)
    # Sums take a quarter of a register a value and column, queries an eighth.
    most = max(1, 16 * 128 // (columns * max(dim, 128)))
    for blocks in range(most, 0, -1):
        for tiles, stages in ((2, 2), (1, 3), (1, 2)):
            shape = Shape(rows, tiles, stages, blocks)
            if blocks * (shape.shared_bytes(token_bytes, dim) + DRIVER_BYTES) <= shared_bytes:
                return shape
    raise ValueError(
        f"two tiles of 16 tokens of {token_bytes} bytes do not fit into the {shared_bytes} bytes of "
        "shared memory that a multiprocessor has"
    )
