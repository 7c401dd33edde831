"""What loaders unpack, from random bytes: the oracle's values, on every path bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import kvq_codecs
from kvq_attention.triton import formats
from kvq_attention.triton.compat import ptx_level
from kvq_attention.triton.side import Side
from kvq_codecs import Encoded
from kvq_codecs.bits import unpack
from kvq_codecs.formats import iso3, iso4

from .cases import compiled, dims_of, each_codec, each_device

TOKENS = 128
# Codes of e4m3 that are NaN: no encoder writes them, and loaders may read ±480.
E4M3_PLANES = {"fp8": "codes", "fp8_e4m3": "codes", "nvfp4": "block_scale"}
# Bits of a code, where it is short enough for all codes to occur in each place of a word
CODE_BITS = {"q8_0": 8, "q6_0": 6, "q4_0": 4, "iso3": 3, "iso4": 4}
ROTATED = ("iso3", "iso4")


@triton.jit
def _unpack(
    a,
    b,
    mask,
    out,
    A_ROW: tl.constexpr,
    B_ROW: tl.constexpr,
    MASKED: tl.constexpr,
    LOAD: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    ASM: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.arange(0, TOKENS)
    inside = None
    if MASKED:
        inside = tl.load(mask + token) != 0
    rows = token.to(tl.int64)
    tiles = LOAD(a, b, rows * A_ROW, rows * B_ROW, inside, DIM, COLUMNS, ASM)
    column = tl.arange(0, COLUMNS) * SPLIT
    for i in tl.static_range(SPLIT):
        values = tiles[i].to(out.dtype.element_ty)
        tl.store(out + token[:, None] * (COLUMNS * SPLIT) + (column + i)[None, :], values)


def random_rows(codec: str, dim: int, device: str) -> Encoded:
    """Rows [1, 1, TOKENS] of random bytes whose scales are 1; no NaN codes of e4m3."""
    spec = kvq_codecs.get(codec).spec
    random = np.random.default_rng(dim)
    planes: dict[str, Any] = {}
    for plane in spec.planes:
        shape = 1, 1, TOKENS, plane.row_items(dim)
        dtype = getattr(torch, plane.dtype)
        if plane.name in ("scale", "row_scale"):
            planes[plane.name] = torch.ones(shape, dtype=dtype, device=device)
            continue
        codes = random.integers(0, 256, (*shape[:3], shape[3] * dtype.itemsize), dtype=np.uint8)
        if E4M3_PLANES.get(codec) == plane.name:
            codes[(codes & 0x7F) == 0x7F] ^= 1
        if codec == "bf16":  # the interpreter widens subnormal numbers wrongly
            codes[..., 1::2] |= 1
        planes[plane.name] = torch.from_numpy(codes).to(device).view(dtype)
    return Encoded(spec, dim, planes)


def tiles_of(
    cache: Encoded, asm: int, mask: torch.Tensor | None = None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The tiles that a loader gives, put together again: [TOKENS, columns · split]."""
    side = Side.of(cache, torch.float16)
    tile, (a, b, _) = side.tile, side.planes
    out = torch.empty(
        TOKENS,
        side.columns * tile.split,
        dtype=dtype,
        device=cache.planes[next(iter(tile.codes))].device,
    )
    _unpack[(1,)](
        a.tensor,
        b.tensor,
        out if mask is None else mask,
        out,
        A_ROW=a.token,
        B_ROW=b.token,
        MASKED=mask is not None,
        LOAD=tile.load,
        DIM=cache.dim,
        COLUMNS=side.columns,
        SPLIT=tile.split,
        ASM=asm,
        TOKENS=TOKENS,
        num_warps=1,
    )
    return out


def codes_of(cache: Encoded) -> np.ndarray[Any, Any]:
    """The oracle's reading of the code planes, [TOKENS, dim]."""
    codec = cache.spec.name
    planes = {name: x[0, 0].cpu().numpy() for name, x in cache.planes.items()}
    if codec == "q8_0":
        return planes["codes"].view(np.uint8)
    if "codes" in planes:
        return np.asarray(unpack(np, planes["codes"], 4))
    low = {"q6_0": 4, "iso3": 2}[codec]
    high = CODE_BITS[codec] - low
    return np.asarray(unpack(np, planes["low"], low) | unpack(np, planes["high"], high) << low)


def expected(cache: Encoded) -> np.ndarray[Any, Any]:
    """What tile · factor must be, float32 [TOKENS, dim]."""
    codec = cache.spec.name
    if codec in ROTATED:  # before they are turned back, as fp16
        centroids = {"iso3": iso3.CENTROIDS, "iso4": iso4.CENTROIDS}[codec]
        return centroids.astype(np.float16).astype(np.float32)[codes_of(cache)]
    host = cache.map(lambda plane: plane.cpu())
    rows = kvq_codecs.get(codec).decode(host)
    return np.asarray(rows.float().numpy()).reshape(TOKENS, cache.dim)


def each_dim(codec: str) -> list[int]:
    return [dim for dim in dims_of(codec) if dim in (64, 80, 96, 128, 256)]


@each_device
@each_codec
def test_loaders_read_what_the_oracle_does(codec: str, device: str) -> None:
    """Every code in every place of a word; the values are exact, so nothing is rounded."""
    for dim in each_dim(codec):
        cache = random_rows(codec, dim, device)
        tile = formats.get(codec).TILE
        found = (tiles_of(cache, ptx_level(torch.device(device))) * tile.factor).cpu().numpy()
        np.testing.assert_array_equal(found[:, :dim], expected(cache))
        if codec in E4M3_PLANES or codec in CODE_BITS:
            assert np.isfinite(found).all(), "columns beyond the row meet a query's zeros"


@pytest.mark.parametrize("codec", CODE_BITS)
def test_random_rows_have_every_code_in_every_place(codec: str) -> None:
    codes = codes_of(random_rows(codec, 128, "cpu"))
    for place in range(8):
        assert len(np.unique(codes[:, place::8])) == 1 << CODE_BITS[codec]


@pytest.mark.parametrize(("codec", "count"), [("fp8", 254), ("fp8_e4m3", 254)])
def test_random_rows_have_every_number_of_e4m3_in_every_place(codec: str, count: int) -> None:
    codes = random_rows(codec, 256, "cpu").planes["codes"][0, 0]
    for place in range(4):
        assert len(codes[:, place::4].unique()) == count


@each_device
@each_codec
def test_rows_left_out_are_finite(codec: str, device: str) -> None:
    """Their bytes are NaN for whatever can say so; the others are as they are without a mask."""
    level = ptx_level(torch.device(device))
    mask = (torch.arange(TOKENS, device=device) % 3 != 0).to(torch.int32)
    for dim in each_dim(codec):
        cache = random_rows(codec, dim, device)
        whole = tiles_of(cache, level)
        for plane in cache.planes.values():
            plane.view(torch.uint8)[0, 0, mask == 0] = 0xFF
        found = tiles_of(cache, level, mask)
        assert torch.isfinite(found[mask == 0]).all()
        assert torch.equal(found[mask == 1].view(torch.int32), whole[mask == 1].view(torch.int32))


@pytest.mark.gpu
@compiled
@each_codec
def test_p032_p004_all_ways_to_unpack_give_the_same_bits(codec: str) -> None:
    """Integer arithmetic, bit moves (sm_80) and, where the GPU has them, conversions."""
    level = ptx_level(torch.device("cuda"))
    for dim in each_dim(codec):
        cache = random_rows(codec, dim, "cuda")
        dtype = formats.get(codec).TILE.codes.get("values", torch.float16)
        bits = torch.int32 if dtype == torch.float32 else torch.int16
        plain = tiles_of(cache, 0, dtype=dtype).view(bits)
        for asm in {80, level}:
            assert torch.equal(tiles_of(cache, asm, dtype=dtype).view(bits), plain), (dim, asm)
