"""iso3 in Triton's kernels; its bytes: `kvq_codecs.formats.iso3`."""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl

from kvq_attention.rotation import quaternions
from kvq_attention.triton.centroids import encode_turned, largest, levels
from kvq_attention.triton.encode import PART, Encoder
from kvq_attention.triton.jit import jit
from kvq_attention.triton.tables import byte_tables
from kvq_attention.triton.tile import Tile
from kvq_attention.triton.words import load_words
from kvq_codecs.formats import iso3 as oracle
from kvq_codecs.rotation import BLOCK

LEVELS = tl.constexpr(levels(oracle.CENTROIDS, oracle.THRESHOLDS))


@jit
def pack(indices):
    """Bytes of a part's indices, per plane: a nibble each first, whose bits then close ranks."""
    word = tl.sum(indices << (4 * tl.arange(0, PART))[None, :], 1)
    low = word & 0x33333333
    low = (low | (low >> 2)) & 0x0F0F0F0F
    low = (low | (low >> 4)) & 0x00FF00FF
    low = low | (low >> 8)
    high = (word >> 2) & 0x11111111
    high = (high | (high >> 3)) & 0x03030303
    high = (high | (high >> 6)) & 0x000F000F
    high = high | (high >> 12)
    low_bytes = low[:, None] >> (8 * tl.arange(0, 2))[None, :]
    return low_bytes.to(tl.uint8), high[:, None].to(tl.uint8)


@jit
def encode(
    source,
    step,
    inside,
    live,
    planes,
    span,
    table,
    DIM: tl.constexpr,
    SPAN: tl.constexpr,
    BF16: tl.constexpr,
):
    """Encode spans of values: see `kvq_attention.triton.encode`."""
    encode_turned(source, step, inside, live, planes, span, table, pack, LEVELS, BF16)


# The hardware's limit: left to itself, ptxas spills for the sake of more threads.
ENCODER = Encoder(encode, spans=(BLOCK,), table=quaternions, max_registers=255)


# Two int16 words hold the low bits of indices 0 … 7 each, two more the top bits. Even and odd
# values become words of nibbles, nibbles of one value in both words neighbours, and a byte
# permutation looks four of them up at once in a table of eight bytes.
_SPREAD = """
    and.b32 top, top, 0x01540154;
    shl.b32 low, top, 4;
    or.b32 top, top, low;
    and.b32 top, top, 0x14141414;
    shl.b32 low, top, 2;
    or.b32 top, top, low;
    lop3.b32 nibbles, top, 0x44444444, nibbles, 0xea;
"""
_LOOK_UP = """
    prmt.b32 low, {low[0]}, {low[1]}, pairs;
    prmt.b32 top, {high[0]}, {high[1]}, pairs;
    prmt.b32 ${first}, low, top, 0x5140;
    prmt.b32 ${second}, low, top, 0x7362;
"""
_PAIRS = """
    shr.b32 top, nibbles, 12;
    and.b32 top, top, 0xf0f0;
    lop3.b32 pairs, nibbles, 0x0f0f, top, 0xea;
    {even}
    shr.b32 top, nibbles, 16;
    and.b32 top, top, 0xf0f0;
    shr.b32 pairs, nibbles, 4;
    lop3.b32 pairs, pairs, 0x0f0f, top, 0xea;
    {odd}
"""
_TABLE = byte_tables(oracle.CENTROIDS.astype(np.float16))


def _pairs(first: int) -> str:
    """Values first, first + 2, first + 4, first + 6: nibbles 0 … 3 of both halves."""
    even = _LOOK_UP.format(first=first, second=first + 4, **_TABLE)
    odd = _LOOK_UP.format(first=first + 2, second=first + 6, **_TABLE)
    return _PAIRS.format(even=even, odd=odd)


UNPACK = tl.constexpr(
    "{\n    .reg .b32 nibbles, top, low, pairs;\n"
    "    and.b32 nibbles, $8, 0x33333333;\n    shl.b32 top, $9, 2;"
    + _SPREAD
    + _pairs(0)
    + "    shr.b32 nibbles, $8, 2;\n    and.b32 nibbles, nibbles, 0x33333333;\n"
    "    shl.b32 top, $9, 1;" + _SPREAD + _pairs(1) + "    }"
)
HALVES = tl.constexpr(tuple(map(float, oracle.CENTROIDS.astype(np.float16))))


@jit
def centroid(low, high):
    """fp16 centroids: two index bits in the low ones of `low`, the top one in bit 0 of `high`."""
    index = (low & 3) | ((high & 1) << 2)
    value = tl.full(index.shape, HALVES[0], tl.float16)
    for i in tl.static_range(1, 8):
        value = tl.where(index == i, HALVES[i], value).to(tl.float16)
    return value


@jit
def load(a, b, a_rows, b_rows, mask, DIM: tl.constexpr, COLUMNS: tl.constexpr, ASM: tl.constexpr):
    """Rows as eight fp16 tiles of centroids, turned values 8c … 8c + 7."""
    low = load_words(a, a_rows, mask, DIM // 8, COLUMNS)
    high = load_words(b, b_rows, mask, DIM // 8, COLUMNS).to(tl.int16)
    if ASM >= 80:
        return tl.inline_asm_elementwise(
            UNPACK,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r",
            [low, high],
            dtype=(
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
                tl.float16,
            ),
            is_pure=True,
            pack=2,
        )
    tiles = ()
    for i in tl.static_range(8):
        tiles = tiles + (centroid(low >> (2 * i), high >> i),)
    return tiles


TILE = Tile(
    load,
    split=8,
    codes={"low": torch.int16, "high": torch.uint8},
    scale="scale",
    rotated=True,
    largest=largest(oracle.CENTROIDS),
)
