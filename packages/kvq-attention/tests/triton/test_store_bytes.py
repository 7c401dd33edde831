"""The stored bytes of rows that tempt a kernel to be nearly right."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from golden_files import arrays

import kvq_codecs
from kvq_attention.triton import store as kernel
from kvq_attention.triton.store_tiles import Config, Tile, pick_tile
from kvq_codecs import Encoded

from ..decode.cases import FULL, ieee
from ..scene import as_numpy, assert_same_bytes, poisoned
from .cases import dims_of, each_codec, each_device

pytestmark = ieee

PAGE_TOKENS = 128
SCALED = ("q8_0", "q6_0", "q4_0", "fp8_e4m3", "fp8", "nvfp4")


def stored(codec: str, rows: torch.Tensor, device: str) -> Encoded:
    """Rows [n, dim] through the kernel, as K and, in the other order, as V: [n] rows of a cache."""
    count, dim = rows.shape
    pages = -(-count // PAGE_TOKENS)
    caches = [poisoned(codec, pages, 1, PAGE_TOKENS, dim, device) for _ in range(2)]
    given = rows[:, None].to(device)
    slots = torch.arange(count, device=device)
    backward = slots.flip(0).contiguous()
    # The interpreter's time depends on the number of programs.
    span = pick_tile(kernel.encoder_of(caches[0]), dim, 1, 128).span
    config = None if device == "cuda" else Config(*[Tile(512, 1, span)] * 2, num_warps=4)
    kernel.launch(given, given[backward], *caches, slots, config=config)
    k, v = (
        cache.map(lambda x: torch.from_numpy(x.cpu().numpy()[:, 0].reshape(-1, x.shape[3])[:count]))
        for cache in caches
    )
    assert_same_bytes(v.map(lambda x: torch.from_numpy(x.numpy()[::-1].copy())), k)
    return k


def check(codec: str, rows: torch.Tensor, device: str) -> None:
    """The oracle's bytes; of values stored as floats, NaN equals NaN."""
    got, wanted = stored(codec, rows, device), kvq_codecs.get(codec).encode(as_numpy(rows))
    if codec in FULL:
        values = got.map(lambda x: x.numpy()), wanted
        decoded = [kvq_codecs.get(codec).decode(encoded).view(np.uint32) for encoded in values]
        numbers = ~np.isnan(as_numpy(rows))
        np.testing.assert_array_equal(decoded[0][numbers], decoded[1][numbers])
        assert np.isnan(decoded[0].view(np.float32)[~numbers]).all()
    else:
        assert_same_bytes(got, wanted.map(torch.from_numpy))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("codec", SCALED)
@each_device
def test_golden_rows(codec: str, dim: int, device: str) -> None:
    """Every golden row: the planes that another program made."""
    vectors = arrays(f"{codec}.npz")
    got = stored(codec, torch.from_numpy(vectors[f"d{dim}_input"]), device)
    planes = {
        name: torch.from_numpy(vectors[f"d{dim}_{name}"]).reshape(plane.shape)
        for name, plane in got.planes.items()
    }
    nan = {"scale": 0x7E00, "row_scale": 0x7FC00000}
    for name, bits in nan.items():  # the files hold any NaN; a stored one has one pattern
        if name in planes:
            items = planes[name].numpy()
            whole = items.view(f"u{items.itemsize}")
            whole[np.isnan(items)] = bits
    assert_same_bytes(got, Encoded(got.spec, dim, planes))


@pytest.mark.parametrize("codec", ["iso3", "iso4"])
@each_device
def test_golden_rows_of_the_c_reference(codec: str, device: str) -> None:
    """Every golden row, those with NaN and infinities too: the reference's blocks."""
    vectors = arrays("iso.npz")
    for rows, part in ((f"{codec}_input", f"{codec}_"), ("special_input", f"{codec}_special_")):
        got = stored(codec, torch.from_numpy(vectors[rows]), device)
        blocks = kvq_codecs.get(codec).to_blocks(got).numpy()
        wanted = vectors[f"{part}packed"]
        np.testing.assert_array_equal(blocks[:, 2:], wanted[:, 2:])
        scales = [np.ascontiguousarray(b[:, :2]).view(np.float16) for b in (blocks, wanted)]
        np.testing.assert_array_equal(*scales)


def adversarial(dim: int) -> torch.Tensor:
    """Rows float32 [n, dim] of zeros, ties, extremes, subnormals and values that are not finite."""
    random = np.random.default_rng(7)
    gaussian = random.standard_normal((8, dim), np.float32)
    tiny, huge = np.float32(2.0**-149), np.finfo(np.float32).max
    halves = (np.arange(dim) % 31 - 15 + 0.5).astype(np.float32)
    rows = [
        np.zeros(dim),
        -np.zeros(dim),
        np.where(np.arange(dim) % 2, -0.0, 0.0),
        np.full(dim, tiny),
        tiny * random.integers(-9, 9, dim),
        np.full(dim, huge),
        huge * np.sign(gaussian[0]),
        halves,
        -halves * np.float32(2.0**-24),
        halves * np.float32(2.0**100),
        np.where(np.arange(dim) == 5, -8.0, 0.5 * (np.arange(dim) % 15)),
        np.where(np.arange(dim) == 3, 1e30, gaussian[1]),
        *(gaussian[1] * np.float32(10.0) ** e for e in (-44, -38, -20, -11, -8, -6, 4, 5, 12, 30)),
        *(gaussian[2] * np.float32(s) for s in (65504, 65519, 65520, 65536, 2.0**-14, 2.0**-24)),
    ]
    for value in (np.nan, -np.nan, np.inf, -np.inf):
        for position in (0, dim // 2, dim - 1):
            row = gaussian[3].copy()
            row[position] = value
            rows.append(row)
    row = gaussian[4].copy()
    row[[1, dim - 2]] = np.inf, np.nan
    rows.append(row)
    return torch.from_numpy(np.stack(rows).astype(np.float32))


@each_codec
@each_device
def test_adversarial_rows(codec: str, device: str) -> None:
    for dim in dims_of(codec)[:: 3 if codec in FULL else 2]:
        check(codec, adversarial(dim), device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@each_codec
@each_device
def test_adversarial_rows_of_sixteen_bits(codec: str, dtype: torch.dtype, device: str) -> None:
    """Every word of the type once: all exponents, subnormals, infinities and NaN."""
    dim = dims_of(codec)[-1]
    words = torch.arange(2**16, dtype=torch.int32).reshape(-1, dim)
    step = 1 if device == "cuda" else 3
    check(codec, words.to(torch.int16).view(dtype)[::step], device)


@pytest.mark.parametrize("codec", FULL)
@each_device
def test_floats_of_every_exponent(codec: str, device: str) -> None:
    """Against torch's own conversions; finite values saturate."""
    # Odd multiples of 2¹² are ties of fp16, of 2¹⁵ those of bf16.
    ties = np.concatenate(
        [np.arange(0, 2**32, step, np.uint32) for step in (2**12 * 99, 2**15 * 5)]
    )
    words = np.concatenate([ties, ties + 1, ties - 1])
    rows = torch.from_numpy(words[: len(words) // 128 * 128].view(np.float32).reshape(-1, 128))
    check(codec, rows, device)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[codec]
    largest = torch.finfo(dtype).max
    wanted = torch.where(rows.isinf(), rows, rows.clamp(-largest, largest)).to(dtype)
    plane = stored(codec, rows, device).planes["values"]
    held = (plane.view(torch.int16) if codec == "bf16" else plane).view(dtype)
    assert torch.equal(held.isnan(), rows.isnan())
    assert torch.equal(held.nan_to_num(0).signbit(), wanted.nan_to_num(0).signbit())
    assert torch.equal(held.nan_to_num(0), wanted.nan_to_num(0))


@pytest.mark.parametrize("codec", ["fp8", "fp8_e4m3"])
@each_device
def test_p032_codes_are_those_of_torchs_float8(codec: str, device: str) -> None:
    """All 254 codes that are numbers, subnormals too, come back; what lies between rounds as torch.

    A row's largest magnitude is 448 · scale, so that a quotient is the value itself.
    """
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
    exact = codes.view(torch.float8_e4m3fn).float()
    middles = (exact[:-1] + exact[1:]) / 2  # ties, but for those from 448 to −0
    near = torch.cat([middles, *(torch.nextafter(middles, x * torch.ones(1)) for x in (-500, 500))])
    values = torch.cat([exact, near])
    values = values[values.abs() <= 448]
    spare = -len(values) % 31
    rows = torch.cat([values, torch.zeros(spare)]).reshape(-1, 31)
    rows = torch.cat([torch.full((len(rows), 1), 448.0), rows], dim=1)  # each 32 have their amax
    rows = rows[: len(rows) // 2 * 2].reshape(-1, 64)
    got = stored(codec, rows, device)
    assert all((scale == 1).all() for name, scale in got.planes.items() if name != "codes")
    wanted = rows.to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(got.planes["codes"], wanted)
    assert set(codes.tolist()) <= set(wanted.flatten().tolist())
