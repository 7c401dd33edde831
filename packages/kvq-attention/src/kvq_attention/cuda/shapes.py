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
# Strides of planes, limits and the piece
WALK_BYTES = 32 + 16 + 48
# What a block takes of shared memory besides its own
DRIVER_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of what a block goes through.

    Attributes
    ----------
    dim : values a row
    token_bytes : K and V of one token and KV head
    planes : of K and V, as many of one as of the other
    """

    dim: int
    token_bytes: int
    planes: int


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

    def shared_bytes(self, sizes: Sizes) -> int:
        """Shared memory of a block.

        As source/walk.cuh lays it out: tiles under way, where planes begin for each lane, what the
        walk is along, queries or means.
        """
        ring = self.stages * self.tiles * TILE * sizes.token_bytes
        addresses = sizes.planes * THREADS * 8
        queries = self.rows * ((sizes.dim + 8) * 2 + 4)
        means = 4 * (sizes.dim + 4) * 4
        return -(-(ring + addresses + WALK_BYTES + max(queries, means)) // 16) * 16


def pick(sizes: Sizes, rows: int, shared_bytes: int) -> Shape:
    """The launch shape for requests of so many query rows a KV head.

    shared_bytes : of a multiprocessor. Raises `ValueError` where not even one block fits.
    """
    rows = next((size for size in (4, 8) if rows <= size), 16)
    # The softmax's reference moves once a step at most, so `tiles` decides a result's last bits: it
    # must not depend on the batch.
    tiles = 2 if sizes.token_bytes <= TWO_TILES_BYTES else 1
    columns = -(-rows // LINES)
    # Sums take a quarter of a register a value and column, queries an eighth.
    blocks = MOST_BLOCKS * 128 // (columns * max(sizes.dim, 128))
    shape = Shape(rows, tiles, 2, blocks)
    taken = shape.shared_bytes(sizes) + DRIVER_BYTES
    if taken > shared_bytes:
        raise ValueError(
            f"a block takes {taken} bytes of shared memory for tokens of {sizes.token_bytes} "
            f"bytes; a multiprocessor has {shared_bytes}"
        )
    return replace(shape, blocks=min(blocks, shared_bytes // taken))
