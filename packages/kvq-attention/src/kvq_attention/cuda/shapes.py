"""How a decode launch is shaped: what a block holds at once. Pure arithmetic on sizes."""

from __future__ import annotations

from dataclasses import dataclass

from kvq_attention.cuda.items import TILE

LINES = 8  # query rows that a product takes
WARP_THREADS = 32
# What a block takes of shared memory besides its own
DRIVER_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a launch.

    Attributes
    ----------
    columns : groups of 8 query rows that a block takes at once
    tiles : of 16 tokens a step
    stages : steps that a warp has under way
    warps : of a block
    blocks : that a multiprocessor's registers are to hold
    """

    columns: int
    tiles: int
    stages: int
    warps: int = 4
    blocks: int = 4

    @property
    def rows(self) -> int:
        """Query rows that a block takes at once."""
        return LINES * self.columns

    @property
    def threads(self) -> int:
        """Of a block."""
        return WARP_THREADS * self.warps

    def shared_bytes(self, token_bytes: int, dim: int) -> int:
        """Shared memory of a block, for a token's K and V of `token_bytes` and `dim` values a row.

        As source/decode.cu lays it out: what warps have under way, or their sums; the queries; the
        weights.
        """
        ring = self.stages * self.tiles * TILE * token_bytes
        sums = self.rows * (dim + 4) * 4
        queries = self.rows * ((dim + 8) * 2 + 4)
        weights = self.warps * (2 * self.rows + 1) * 4
        return self.warps * -(-max(ring, sums) // 128) * 128 + queries + weights


def pick(token_bytes: int, dim: int, rows: int, shared_bytes: int) -> Shape:
    """The launch shape for requests of so many query rows a KV head.

    token_bytes : of K and V of one token and KV head; shared_bytes : of a multiprocessor. Raises
    `ValueError` where not even the smallest fits.
    """
    columns = 1 if rows <= LINES else 2
    # Sums and queries take 3/8 of a register a value and column; 128 registers hold one of 128.
    blocks = max(1, 4 * 128 // (columns * max(dim, 128)))
    for tiles, stages in ((2, 2), (1, 3), (1, 2)):
        shape = Shape(columns, tiles, stages, blocks=blocks)
        if blocks * (shape.shared_bytes(token_bytes, dim) + DRIVER_BYTES) <= shared_bytes:
            return shape
    for fewer in range(blocks - 1, 0, -1):
        for tiles, stages in ((2, 2), (1, 3), (1, 2)):
            shape = Shape(columns, tiles, stages, blocks=fewer)
            if fewer * (shape.shared_bytes(token_bytes, dim) + DRIVER_BYTES) <= shared_bytes:
                return shape
    raise ValueError(
        f"two tiles of 16 tokens of {token_bytes} bytes a warp do not fit into the {shared_bytes} "
        "bytes of shared memory that a multiprocessor has"
    )
