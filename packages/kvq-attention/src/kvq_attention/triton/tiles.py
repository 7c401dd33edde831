"""How a decode launch is shaped: tile, pipeline, chunks. Pure arithmetic on sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvq_attention import chunks

# Part of what decides a result's last bits: they hold for every launch. See `kvq_attention.chunks`.
CHUNK = 1024
SMALLEST_CHUNK = 128
MAX_CHUNKS = 128
# Of requests whose bits must not depend on their lengths: few results to merge, and still a few
# pieces of a long past beside few queries.
FIXED_CHUNK = 4096
FIXED_CHUNKS = 256


@dataclass(frozen=True, slots=True)
class Config:
    """The shape of a decode launch.

    Attributes
    ----------
    tokens : tokens a tile, a power of two of at least 16
    warps : warps a program
    stages : tiles in flight: the loads of stages − 1 tiles run ahead of the arithmetic
    programs : programs a multiprocessor, which share its work
    chunk : tokens that a request's chunks grow to, a multiple of `tokens`; see `items.chunking`
    smallest : tokens a chunk at least; twice as many are never cut
    max_chunks : chunks a request is cut into at most, a power of two; longer ones get longer chunks
    fixed : chunks are of `chunk` tokens each and begin on multiples of it, whatever a request's
        length, and the last of `max_chunks` has all that is left
    """

    tokens: int
    warps: int
    stages: int
    programs: int
    chunk: int = CHUNK
    smallest: int = SMALLEST_CHUNK
    max_chunks: int = MAX_CHUNKS
    fixed: bool = False

    def __post_init__(self) -> None:
        if self.chunk % self.tokens or self.chunk < 1:
            raise ValueError(
                f"a chunk must hold whole tiles: {self.chunk} tokens are none of {self.tokens}"
            )

    def wanted(self, requests: int | None, pieces: int, processors: int) -> int:
        """Chunks of so many pieces a request that fill a device: see `chunks.wanted`."""
        return chunks.wanted(requests, pieces, self.programs * processors)


@dataclass(frozen=True, slots=True)
class Load:
    """What a tile of one side, K or V, takes.

    Attributes
    ----------
    values : values a row, padded to what products accept
    tokens : tokens a tile that registers have room for, see `Tile`
    row_bytes : bytes of a row, scales included and padded likewise
    product_bytes : bytes of a value in a product
    narrow : its tiles have so few columns that unpacked ones are laid out anew in shared memory
    """

    values: int
    tokens: int
    row_bytes: int
    product_bytes: int
    narrow: bool = False


def power_of_two(n: int) -> int:
    """The least power of two that is not below n. Triton's own function takes 5 µs a call."""
    return 1 << (n - 1).bit_length()


def pick(k: Load, v: Load, *, shared_bytes: int, warps: int) -> Config:
    """The launch shape for caches of these formats.

    shared_bytes, warps: shared memory and warps of a decode that a multiprocessor has room for
    (its registers hold 8 at the 255 a thread that decode takes). Programs of one warp keep
    scores and probabilities in registers; larger rows and float32 products need more warps to
    hold their sums. Raises `ValueError` where not even the smallest tile fits.
    """
    wide = max(k.product_bytes, v.product_bytes) > 2
    width = max(k.values, v.values)
    per_program = min(warps, max(1, width // 128) * (2 if wide else 1))
    tokens = max(min(k.tokens, v.tokens), 8 * per_program)
    stages = 2 if wide or tokens > 16 else 3  # small tiles need more of them under way
    while (taken := shared_taken(k, v, tokens, stages, per_program)) > shared_bytes:
        if (tokens, stages) == (16, 2):
            raise ValueError(
                f"{tokens} tokens of {k.row_bytes} + {v.row_bytes} bytes take {taken} bytes of "
                f"shared memory in {stages} stages; a multiprocessor has {shared_bytes}"
            )
        tokens, stages = (tokens, 2) if stages > 2 else (tokens // 2, 2)
    programs = max(1, min(warps // per_program, shared_bytes // taken))
    return Config(tokens=tokens, warps=per_program, stages=stages, programs=programs)


def fixed(config: Config) -> Config:
    """The same shape for requests whose bits must not depend on where they are cut into steps."""
    return replace(config, chunk=FIXED_CHUNK, max_chunks=FIXED_CHUNKS, fixed=True)


def shared_taken(k: Load, v: Load, tokens: int, stages: int, warps: int) -> int:
    """Bytes of shared memory that a program takes at most.

    The pages of a tile's tokens are fetched a stage before the tile, and values are used up
    later than keys: keys lie there twice, values once, and each stage above three adds a copy.
    """
    row = max(2, stages - 1) * k.row_bytes + max(1, stages - 2) * v.row_bytes
    exchange = 4096 if warps == 1 else 12288  # layouts of scores and odd tiles change through it
    exchange += max(tokens * side.values * side.product_bytes * side.narrow for side in (k, v))
    return tokens * (row + 8) + exchange + 1024  # the last is the driver's own


def most_chunks(
    reach: int, window: int | None, queries: int, config: Config, wanted: int = 1
) -> int:
    """Chunks that a request has at most, of `reach` tokens and up to `queries` queries.

    A bound of what `items.chunking` counts on the device.
    """
    visible = reach
    if window is not None:  # chunks begin up to a tile or a chunk before the first visible position
        before = config.chunk if config.fixed else config.tokens
        visible = min(reach, window + queries + before)
    if config.fixed:
        return min(max(1, -(-visible // config.chunk)), config.max_chunks)
    return chunks.count(
        visible,
        wanted,
        alone=min(2 * config.smallest, config.chunk),
        smallest=config.smallest,
        largest=config.chunk,
        most=config.max_chunks,
    )
