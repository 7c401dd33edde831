"""The launch shape that is picked, and the cut of a batch that it bounds."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kvq_attention.triton.decode import WARPS
from kvq_attention.triton.items import chunking
from kvq_attention.triton.tiles import (
    Config,
    Load,
    fixed,
    most_chunks,
    pick,
    shared_taken,
)

from .cases import DIMS, interpreted
from .sides import loads

# Of a multiprocessor with 100 and with 228 KiB, and of a program there
SHARED_KIB = (99, 100, 227, 228)
CONFIGS = (
    Config(tokens=16, warps=1, stages=3, programs=8),
    Config(tokens=32, warps=1, stages=2, programs=8, chunk=64, smallest=32, max_chunks=8),
    Config(tokens=64, warps=8, stages=2, programs=1, chunk=64, smallest=64, max_chunks=4),
    Config(tokens=128, warps=4, stages=2, programs=2, chunk=2048, max_chunks=32),
    Config(tokens=16, warps=1, stages=2, programs=8, chunk=64, max_chunks=8, fixed=True),
    Config(tokens=64, warps=1, stages=2, programs=8, chunk=4096, max_chunks=256, fixed=True),
)
WANTED = (1, 3, 40, 10**6)
each_wanted = pytest.mark.parametrize("wanted", WANTED)
each_config = pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda config: f"{config.tokens}{'-fixed' * config.fixed}"
)
LONGEST = 2**31 - 1


def sides(dim: int) -> list[Load]:
    """What formats take; bf16 by bf16 too, which the interpreter does not multiply."""
    found = loads(dim)
    return [*found.values(), replace(found["bf16"], product_bytes=2)]


@pytest.mark.parametrize("kib", SHARED_KIB)
def test_every_pair_of_formats_gets_a_launch_that_fits(kib: int) -> None:
    checked = 0
    for k_dim, v_dim in product(DIMS, DIMS):
        for k, v in product(sides(k_dim), sides(v_dim)):
            config = pick(k, v, shared_bytes=kib << 10, warps=WARPS)
            assert config.tokens in (16, 32, 64, 128), "what products and ranges accept"
            assert config.chunk % config.tokens == 0
            assert config.warps in (1, 2, 4, 8)
            assert config.stages >= 2, "loads run ahead"
            taken = shared_taken(k, v, config.tokens, config.stages, config.warps)
            assert config.programs >= 1
            assert config.programs * taken <= kib << 10
            assert config.programs * config.warps <= WARPS
            checked += 1
    assert checked > 3000


def test_more_shared_memory_makes_no_launch_smaller() -> None:
    for dim in DIMS:
        for k, v in product(sides(dim), sides(dim)):
            found = [pick(k, v, shared_bytes=kib << 10, warps=WARPS) for kib in SHARED_KIB]
            for small, large in pairwise(found):
                assert large.tokens * large.stages >= small.tokens * small.stages
                assert (large.tokens, large.stages) != (small.tokens, small.stages) or (
                    large.programs >= small.programs
                )


def test_a_tile_that_fits_nowhere_is_refused() -> None:
    side = loads(256)["fp32"]
    least = shared_taken(side, side, 16, 2, 4)
    assert pick(side, side, shared_bytes=least, warps=WARPS).tokens == 16
    said = (
        rf"^16 tokens of 1024 \+ 1024 bytes take {least} bytes of shared memory in 2 stages; "
        rf"a multiprocessor has {least - 1}$"
    )
    with pytest.raises(ValueError, match=said):
        pick(side, side, shared_bytes=least - 1, warps=WARPS)


def test_a_chunk_holds_whole_tiles() -> None:
    for chunk in (100, 0, -64):
        with pytest.raises(ValueError, match=f"whole tiles: {chunk} tokens are none of 32"):
            Config(tokens=32, warps=1, stages=2, programs=1, chunk=chunk)


def cut(
    queries: int, length: int, reach: int, window: int | None, config: Config, wanted: int = 1
) -> tuple[int, int, int]:
    """First position, tokens a chunk and chunks: what `chunking` says in words, in integers."""
    tile = config.tokens
    first = 0 if window is None else max(length - queries - window + 1, 0) // tile * tile
    size = config.chunk
    if config.fixed:
        first = first // size * size
        chunks = -(-max(min(length, reach) - first, 1) // size)
        return first, size, min(chunks, config.max_chunks) if queries > 0 else 0
    visible = max(min(length, reach) - first, 1)
    chunks = max(min(wanted, visible // config.smallest), -(-visible // config.chunk))
    if visible <= min(2 * config.smallest, config.chunk):
        chunks = 1
    # Whole tiles, and as few as so many chunks hold everything by.
    tiles = (visible + tile - 1) // tile
    size = -(-tiles // min(chunks, config.max_chunks)) * tile
    return first, size, -(-visible // size) if queries > 0 else 0


@triton.jit
def _cut(
    queries,
    lengths,
    out,
    reach,
    chunk,
    wanted,
    window,
    WINDOW: tl.constexpr,
    TOKENS: tl.constexpr,
    SMALLEST: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    FIXED: tl.constexpr,
    SIZE: tl.constexpr,
):
    at = tl.arange(0, SIZE)
    first, size, count = chunking(
        tl.load(queries + at),
        tl.load(lengths + at),
        reach,
        chunk,
        wanted,
        window,
        WINDOW,
        TOKENS,
        SMALLEST,
        MAX_CHUNKS,
        FIXED,
    )
    tl.store(out + at, first)
    tl.store(out + SIZE + at, size)
    tl.store(out + 2 * SIZE + at, count)


def lengths_of_interest(config: Config) -> list[int]:
    """All short ones, the neighbours of what decides, and large ones."""
    random = np.random.default_rng(config.tokens)
    edges = {
        base * factor + d
        for base in (config.chunk, config.chunk * config.max_chunks, 8 * config.tokens)
        for factor in (1, 2, 4, 8, 9)
        for d in (-1, 0, 1)
    }
    large = (2.0 ** random.uniform(10, 31, 500)).astype(np.int64).clip(0, LONGEST)
    return [*range(600), *sorted(edges), *map(int, large)]


@interpreted
@each_config
@pytest.mark.parametrize("window", [None, 1, 100, 5000])
def test_the_device_cuts_as_it_is_said(config: Config, window: int | None) -> None:
    lengths = lengths_of_interest(config)
    size = 1 << (len(lengths) - 1).bit_length()
    lengths += lengths[: size - len(lengths)]
    queries = [min(i % 9, length) for i, length in enumerate(lengths)]
    for reach, wanted in product((700, LONGEST), WANTED):
        out = torch.empty(3, size, dtype=torch.int32)
        given = torch.tensor(queries, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
        _cut[(1,)](
            *given,
            out,
            reach,
            config.chunk,
            wanted,
            window or 0,
            WINDOW=window is not None,
            TOKENS=config.tokens,
            SMALLEST=config.smallest,
            MAX_CHUNKS=config.max_chunks,
            FIXED=config.fixed,
            SIZE=size,
        )
        for index, found in enumerate(out.T.tolist()):
            what = queries[index], lengths[index], reach, window
            assert tuple(found) == cut(*what, config, wanted), (what, wanted)


@each_config
@each_wanted
@pytest.mark.parametrize("window", [None, 1, 100, 5000])
def test_chunks_cover_what_is_seen_and_their_number_is_bounded(
    config: Config, window: int | None, wanted: int
) -> None:
    random = np.random.default_rng(7)
    short = product((1, 2, 8, 33), range(1, 4000, 7), (64, 1000, 3000, 10**6))
    large = (2.0 ** random.uniform(0, 31, (2000, 2))).astype(np.int64).clip(1, LONGEST)
    for queries, length, reach in [*short, *((int(a) % 9, *map(int, (a, b))) for a, b in large)]:
        asked = min(queries, length)
        first, size, chunks = cut(asked, length, reach, window, config, wanted)
        assert first % config.tokens == size % config.tokens == 0
        assert chunks <= most_chunks(reach, window, asked, config, wanted) <= config.max_chunks
        if asked:
            seen = 0 if window is None else max(length - asked - window + 1, 0)
            assert first <= seen
            rest = config.fixed and chunks == config.max_chunks  # is the last one's
            assert rest or first + chunks * size >= min(length, reach)


@each_config
@each_wanted
def test_the_bound_of_chunks_is_reached(config: Config, wanted: int) -> None:
    """A looser one would cost memory: partial results have room for it."""
    for reach in (1, config.chunk, config.chunk + 1, 4 * config.chunk, 9 * config.chunk):
        most = max(cut(1, length, reach, None, config, wanted)[2] for length in range(1, reach + 1))
        assert most <= most_chunks(reach, None, 1, config, wanted) <= 2 * most, reach


@each_config
@each_wanted
def test_the_cut_knows_nothing_of_a_requests_company(config: Config, wanted: int) -> None:
    """Not even how wide the page table is that others made so."""
    for length in range(1, 3000, 11):
        cuts = {cut(1, length, reach, 500, config, wanted) for reach in (length, length + 1, 10**6)}
        assert len(cuts) == 1


def test_fixed_chunks_begin_on_multiples_wherever_a_request_ends() -> None:
    config = fixed(CONFIGS[0])
    size = config.chunk
    for window in (None, 100, 3 * size):
        for length in range(1, 9 * size, 511):
            for queries in (1, 17, 512, length):
                asked = min(queries, length)
                first, chunk, _ = cut(asked, length, LONGEST, window, config)
                seen = 0 if window is None else max(length - asked - window + 1, 0)
                assert (first, chunk) == (seen // size * size, size)


def test_as_many_chunks_are_wanted_as_fill_a_device() -> None:
    """By all pieces of the requests that calls usually have."""
    config = CONFIGS[0]
    for processors, pieces, requests in product((1, 24, 132), (1, 2, 8), (1, 3, 16, 500)):
        found = config.wanted(requests, pieces, processors)
        full, each = config.programs * processors, requests * pieces
        assert found * each <= max(full, each) < (found + 1) * each
