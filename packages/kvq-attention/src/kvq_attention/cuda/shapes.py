"""How a decode launch is shaped: what a block holds at once. Pure arithmetic on sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvq_attention.cuda.items import ROWS, TILE

LINES = 8  # query rows that a product takes
WARP = 32  # threads
# Warps that a multiprocessor's registers hold of 128 values a row and up to 8 query rows
MOST_WARPS = 16
# Bytes of a token up to which two tiles a step leave room for as many blocks
TWO_TILES_BYTES = 160
# Strides of planes, an operand of products, limits and the piece
WALK_BYTES = 32 + 16 + 16 + 48
# What a block takes of shared memory besides its own
DRIVER_BYTES = 1024
# What may lie before a table whose address kernels know
TABLE_FROM = 1024


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of what a block goes through.

    Attributes
    ----------
    dim : values a row
    token_bytes : K and V of one token and KV head
    lanes : that copy bytes of K's and V's planes, in all
    table_bytes : of the table that codes can be looked up in; 0 = there is none
    """

    dim: int
    token_bytes: int
    lanes: int
    table_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a launch.

    Attributes
    ----------
    rows : query rows that a warp takes at once: 4, 8 or 16
    tiles : of 16 tokens a step
    stages : steps under way
    blocks : that a multiprocessor's registers are to hold
    warps : of a block
    tabled : whether codes are looked up in a table that a block's warps share
    """

    rows: int
    tiles: int
    stages: int
    blocks: int
    warps: int = 1
    tabled: bool = False

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.warps * WARP

    def shared_bytes(self, sizes: Sizes) -> int:
        """Shared memory of a block.

        As source/walk.cuh lays it out: a table; of each warp tiles under way, where planes begin
        for each lane, what the walk is along, and queries.
        """
        table = TABLE_FROM + sizes.table_bytes if self.tabled else 0
        ring = self.stages * self.tiles * TILE * sizes.token_bytes
        addresses = -(-(sizes.lanes + WARP) // 2) * 16
        columns = -(-self.rows // LINES)
        queries = -(-self.rows * ((sizes.dim + 8) * 2 + 4) // 16) * 16
        if self.tiles > 1 or columns > 1:  # which operands of products take the place of
            queries = max(queries, columns * sizes.dim * 16)
        lines = -(-self.rows * 8 // 16) * 16
        warp = ring + addresses + WALK_BYTES + lines + queries
        return table + self.warps * (warp if self.warps == 1 else -(-warp // 128) * 128)


def pick(sizes: Sizes, rows: int, shared_bytes: int) -> Shape:
    """The launch shape for requests of so many query rows a KV head.

    shared_bytes : of a multiprocessor. Raises `ValueError` where not even one block fits.

    `tiles`, as the softmax's reference moves once a step at most, and `tabled`, beside which
    products are summed up in another order, decide a result's last bits: neither depends on the
    batch.
    """
    rows = next((size for size in ROWS if rows <= size), ROWS[-1])
    shape = _without_table(sizes, rows, shared_bytes)
    if not sizes.table_bytes:
        return shape
    most = _without_table(sizes, ROWS[-1], shared_bytes)
    if 2 * _with_table(most, sizes, shared_bytes).warps < most.blocks:
        return shape  # one block with one table leaves too few warps
    return _with_table(shape, sizes, shared_bytes)


def _without_table(sizes: Sizes, rows: int, shared_bytes: int) -> Shape:
    """Blocks of one warp."""
    columns = -(-rows // LINES)
    # Sums take a quarter of a register a value and column, queries an eighth.
    most = MOST_WARPS * 128 // (columns * max(sizes.dim, 128))
    shape = Shape(rows, 2 if sizes.token_bytes <= TWO_TILES_BYTES else 1, 2, most)
    taken = shape.shared_bytes(sizes) + DRIVER_BYTES
    if taken > shared_bytes:
        raise ValueError(
            f"a block takes {taken} bytes of shared memory for tokens of {sizes.token_bytes} "
            f"bytes; a multiprocessor has {shared_bytes}"
        )
    return replace(shape, blocks=min(most, shared_bytes // taken))


def _with_table(shape: Shape, sizes: Sizes, shared_bytes: int) -> Shape:
    """One block of as many warps as fit beside a table; of none where none does."""
    columns = -(-shape.rows // LINES)
    warps = MOST_WARPS * 128 // (columns * max(sizes.dim, 128))
    shape = replace(shape, blocks=1, warps=warps, tabled=True)
    while shape.warps and shape.shared_bytes(sizes) + DRIVER_BYTES > shared_bytes:
        shape = replace(shape, warps=shape.warps - 1)
    return shape
