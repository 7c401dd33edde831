"""Headers of formats unpack every unit, in either place of a word, as the oracle decodes it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import kvq_codecs
from kvq_attention.cuda import formats
from kvq_attention.cuda.compile import SOURCE, compile, resources, source
from kvq_codecs import Encoded
from kvq_codecs.bits import unpack
from kvq_codecs.formats import iso3, iso4

from .emulator.program import Program, build, needs_compiler

ARCHS = (80, 86, 89, 90, 100, 120)
UNITS = np.arange(1 << 16, dtype=np.uint32)
DIM = 128
BY_ARCH = ("fp8", "fp8_e4m3", "nvfp4")  # unpacked by other instructions before sm_89
HAVE_E4M3 = ("fp8", "fp8_e4m3", "nvfp4")
KERNELS = ("facts", "unpacked")
TEXT = """
extern "C" GLOBAL void facts(float* out) {
  out[0] = F::SPLIT;
  out[1] = F::SECOND;
  out[2] = F::BLOCK;
  out[3] = F::SCALE_BYTES;
  out[4] = F::ROTATED;
  out[5] = F::BF16;
  out[6] = F::FACTOR;
  out[7] = F::OFFSET;
  out[8] = F::NEIGHBOURS;
  for (int i = 0; i < F::SPLIT; i++) out[9 + i] = F::place(i);
}

template <class Format>
DEVICE u32 second_of(u32 bytes) {
  if constexpr (Format::SECOND > 1) return halves_of_e4m3(permute(bytes, 0, 0x4420));
  return bytes;
}

extern "C" GLOBAL void unpacked(u32* keys, u32* values, const u32* words, const u32* seconds,
                                int count) {
  for (int i = 32 * block() + lane(); i < count; i += 32 * blocks()) {
    u32 key[F::SPLIT], value[F::SPLIT];
    F::unpack_key(words[i], second_of<F>(seconds[i]), {}, key);
    F::unpack_value(words[i], second_of<F>(seconds[i]), {}, value);
#pragma unroll
    for (int j = 0; j < F::SPLIT; j++) {
      keys[F::SPLIT * i + j] = key[j];
      values[F::SPLIT * i + j] = value[j];
    }
  }
}
"""

TABLED_KERNELS = (*KERNELS, "sizes", "in_registers", "in_table")
TABLED_TEXT = """
extern "C" GLOBAL void sizes(int* out) {
  out[0] = T::TABLE_BYTES + KNOWN_FROM;
  out[1] = F::NEIGHBOURS;
  out[2] = T::NEIGHBOURS;
}

// Keys' pairs, then values'.
template <class Format>
DEVICE void write_pairs(u32* out, const u32* words, const u32* seconds, int count) {
  constexpr int SPLIT = Format::SPLIT;
  const SharedAddress table = known_address(0);
  check_known_addresses();
  Format::fill_table(table, lane() + 32 * warp(), THREADS);
  sync_block();
  for (int i = THREADS * block() + lane() + 32 * warp(); i < count; i += THREADS * blocks()) {
    u32 pairs[2][SPLIT];
    Format::unpack_key(words[i], seconds[i], table, pairs[0]);
    Format::unpack_value(words[i], seconds[i], table, pairs[1]);
#pragma unroll
    for (int j = 0; j < 2 * SPLIT; j++) out[2 * SPLIT * i + j] = pairs[j / SPLIT][j % SPLIT];
  }
}

extern "C" GLOBAL void in_registers(u32* out, const u32* words, const u32* seconds, int count) {
  write_pairs<F>(out, words, seconds, count);
}

extern "C" GLOBAL void in_table(u32* out, const u32* words, const u32* seconds, int count) {
  write_pairs<T>(out, words, seconds, count);
}
"""
THREADS = 64  # of a block that fills a table

each_codec = pytest.mark.parametrize("codec", formats.TYPES)


def text(codec: str) -> str:
    format = formats.get(codec)
    return f'#include "primitives.cuh"\n#include "{format.header}"\n{kernels(codec)}'


def kernels(codec: str) -> str:
    format = formats.get(codec)
    plain = f"using F = {format.type};{TEXT}"
    if format.tabled is None:
        return plain
    return f"{plain}\nusing T = {format.tabled};\nconstexpr int THREADS = {THREADS};{TABLED_TEXT}"


def names(codec: str) -> tuple[str, ...]:
    return TABLED_KERNELS if codec in formats.TABLED else KERNELS


@functools.cache
def program(codec: str, arch: int) -> Program:
    return build(text(codec), names(codec), arch=arch)


@dataclass(frozen=True)
class Facts:
    """What a header says; `places` of the values of a unit."""

    split: int
    second: int
    block: int
    scale_bytes: int
    rotated: bool
    bf16: bool
    factor: float
    offset: int
    neighbours: bool
    places: np.ndarray


@functools.cache
def facts(codec: str, arch: int = 90) -> Facts:
    out = np.full(9 + 8, np.nan, np.float32)
    program(codec, arch).launch("facts", grid=1, threads=32, args=[out])
    split, second, block, scale_bytes, rotated, bf16, factor, offset, neighbours, *places = map(
        float, out
    )
    return Facts(
        int(split),
        int(second),
        int(block),
        int(scale_bytes),
        bool(rotated),
        bool(bf16),
        factor,
        int(offset),
        bool(neighbours),
        np.array(places[: int(split)]),
    )


def sizes(codec: str) -> tuple[int, dict[str, bool]]:
    """Bytes of shared memory for a table, and whether keys' pairs are neighbours, by kernel."""
    out = np.full(3, -1, np.int32)
    program(codec, 90).launch("sizes", grid=1, threads=32, args=[out])
    return int(out[0]), {"in_registers": bool(out[1]), "in_table": bool(out[2])}


def test_the_constants_are_those_of_the_oracle() -> None:
    assert (SOURCE / formats.CONSTANTS).read_text(encoding="utf-8") == formats.constants()


@needs_compiler
@each_codec
def test_headers_say_what_specs_say(codec: str) -> None:
    spec, format = kvq_codecs.get(codec).spec, formats.get(codec)
    said = facts(codec)
    assert [name for name in format.planes if name] == [plane.name for plane in spec.planes]
    codes = spec.plane(format.codes)
    assert said.split * codes.row_bytes(DIM) == 2 * DIM
    if format.second is None:
        assert said.second == 0
    else:
        assert spec.plane(format.second).row_bytes(DIM) * said.split * said.second == DIM
    if format.scale is None:
        assert (said.block, said.scale_bytes) == (-1, 0)
    else:
        scale = spec.plane(format.scale)
        assert said.block == (scale.span or 0)
        assert said.scale_bytes == scale.row_bytes(DIM) / scale.row_items(DIM)
    assert said.rotated == formats.get(codec).rotated == codec.startswith("iso")
    assert said.bf16 == (codec == "bf16")


def cases(codec: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Units and second bytes [n], in parts: each unit with each byte that its values depend on."""
    if formats.get(codec).second is None:
        yield UNITS, np.zeros_like(UNITS)
        return
    for first in range(0, 256, 16):
        seconds = np.arange(first, first + 16, dtype=np.uint32)
        yield np.tile(UNITS, 16), np.repeat(seconds, UNITS.size)


def expected(codec: str, arch: int, units: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Bits of operands for what units hold by the oracle, under scales of 1: [n, SPLIT]."""
    spec, format, said = kvq_codecs.get(codec).spec, formats.get(codec), facts(codec, arch)
    split = said.split
    if split == 1:
        return units.astype(np.uint16)[:, None]
    planes: dict[str, Any] = {}
    for plane in spec.planes:
        shape = units.size * split // DIM, plane.row_items(DIM)
        if plane.name == format.codes:
            items = units.astype("<u2").view(np.uint8)
        elif plane.name == format.second:
            items = seconds[:: said.second].astype(np.uint8)
        else:
            items = np.ones(shape, plane.dtype)
        planes[plane.name] = items.reshape(shape)
    if codec == "iso3":  # before groups are turned back
        indices = unpack(np, planes["low"], 2) | unpack(np, planes["high"], 1) << 2
        values = iso3.CENTROIDS[indices]
    elif codec == "iso4":
        values = iso4.CENTROIDS[unpack(np, planes["codes"], 4)]
    else:
        values = kvq_codecs.get(codec).decode(Encoded(spec, DIM, planes)).reshape(-1, split)
        if said.offset:  # 0 would make -0 another
            values = values + np.float32(said.offset)
        values = values * 2**said.places / said.factor
        np.testing.assert_array_equal(values, values.astype(np.float16))
    return values.astype(np.float16).view(np.uint16).reshape(-1, split)


def unpacked(
    codec: str, arch: int, words: np.ndarray, seconds: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Bits of operands of the low and the high unit of words, [2, n, SPLIT]: keys and values."""
    said = facts(codec, arch)
    keys, values = np.zeros((2, words.size, said.split), np.uint32)
    args = [keys, values, words, seconds, words.size]
    program(codec, arch).launch("unpacked", grid=1, threads=32, args=args)
    halves = np.stack([keys & 0xFFFF, keys >> 16], -1).astype(np.uint16)
    if said.neighbours:  # registers [unit, pair of values][value of the pair]
        keys = halves.reshape(-1, 2, said.split).swapaxes(0, 1)
    else:
        keys = np.moveaxis(halves, -1, 0)
    return keys, np.stack([values & 0xFFFF, values >> 16]).astype(np.uint16)


@needs_compiler
@pytest.mark.parametrize(
    ("codec", "arch"), [(c, 90) for c in formats.TYPES] + [(c, 80) for c in BY_ARCH]
)
def test_every_unit_reads_as_the_oracle_does(codec: str, arch: int) -> None:
    """All units lie in both places of words, the other place holding any other."""
    factor = facts(codec, arch).factor
    for units, seconds in cases(codec):
        other = np.random.default_rng(int(seconds[0])).permutation(units.size)
        words, pairs = units | units[other] << 16, seconds | seconds[other] << 16
        low = expected(codec, arch, units, seconds)
        wanted = np.stack([low, low[other]])
        for found in unpacked(codec, arch, words, pairs):
            if codec in HAVE_E4M3:  # codes of NaN, which no encoder writes, may read as 480
                nan = (wanted & 0x7FFF) > 0x7C00
                read = found[nan].view(np.float16).astype(np.float32) * factor
                assert np.all(np.isnan(read) | (np.abs(read) % 240 == 0))
                found[nan] = wanted[nan]
            np.testing.assert_array_equal(found, wanted)


@needs_compiler
@pytest.mark.parametrize("kernel", ["in_registers", "in_table"])
@pytest.mark.parametrize("codec", formats.TABLED)
def test_pairs_of_keys_and_values_are_those_of_every_unit(codec: str, kernel: str) -> None:
    """By all lanes; a key's pairs may be neighbours of a unit, a value's are of both units."""
    shared_bytes, neighbours = sizes(codec)
    for units, seconds in cases(codec):
        other = np.random.default_rng(int(seconds[0])).permutation(units.size)
        words, pairs = units | units[other] << 16, seconds | seconds[other] << 16
        low = expected(codec, 90, units, seconds)
        both = np.stack([low, low[other]], axis=2)
        keys = np.concatenate([low, low[other]], axis=1).reshape(both.shape)
        out = np.zeros((units.size, 2, low.shape[1]), np.uint32)
        args = [out, words, pairs, words.size]
        program(codec, 90).launch(
            kernel, grid=1, threads=THREADS, shared_bytes=shared_bytes, args=args
        )
        found = out.view(np.uint16).reshape(units.size, 2, *both.shape[1:])
        np.testing.assert_array_equal(found[:, 0], keys if neighbours[kernel] else both)
        np.testing.assert_array_equal(found[:, 1], both)


@each_codec
@pytest.mark.parametrize("arch", ARCHS)
def test_headers_compile(codec: str, arch: int) -> None:
    whole = f"{source(formats.get(codec).header, {})}{kernels(codec)}"
    found = resources(compile(whole, arch))
    assert found.keys() == set(names(codec))
    assert not [kernel for kernel in found.values() if kernel.stack_bytes]
