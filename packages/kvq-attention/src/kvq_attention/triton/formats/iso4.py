"""iso4 in Triton's kernels; its bytes: `kvq_codecs.formats.iso4`."""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl

from kvq_attention.rotation import quaternions
from kvq_attention.triton.centroids import encode_turned, largest, levels
from kvq_attention.triton.encode import Encoder, pack_nibbles
from kvq_attention.triton.jit import jit
from kvq_attention.triton.tables import byte_tables
from kvq_attention.triton.tile import Tile
from kvq_attention.triton.words import load_words
from kvq_codecs.formats import iso4 as oracle
from kvq_codecs.rotation import BLOCK

LEVELS = tl.constexpr(levels(oracle.CENTROIDS, oracle.THRESHOLDS))


@jit
def pack(indices):
    """Bytes of a part's indices, per plane."""
    return (pack_nibbles(indices),)


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


ENCODER = Encoder(encode, spans=(BLOCK,), table=quaternions)


MAGNITUDES = oracle.CENTROIDS[8:].astype(np.float16)  # index 15 − n has the negative of index n

# Two int16 words hold indices 0 … 3 each. A byte permutation looks four indices up at once in a
# table of eight bytes, so they are paired first: (word, next word) of value 0, the same of 2.
# From 8 on the low three bits count backwards, and the sign, set in the table, is flipped.
_LOOK_UP = """
    shr.b32 flip, pairs, 3;
    and.b32 flip, flip, 0x1111;
    mul.lo.u32 flip, flip, 7;
    lop3.b32 pairs, pairs, flip, 0x7777, 0x28;
    prmt.b32 low, {low[0]}, {low[1]}, pairs;
    prmt.b32 high, {high[0]}, {high[1]}, pairs;
    prmt.b32 ${first}, low, high, 0x5140;
    prmt.b32 ${second}, low, high, 0x7362;
    shl.b32 flip, $4, {up_first};
    lop3.b32 ${first}, flip, 0x80008000, ${first}, 0x6a;
    shl.b32 flip, $4, {up_second};
    lop3.b32 ${second}, flip, 0x80008000, ${second}, 0x6a;
"""
_TABLE = byte_tables(-MAGNITUDES[::-1])
UNPACK = tl.constexpr(
    "{\n    .reg .b32 pairs, flip, low, high;\n"
    "    shr.b32 flip, $4, 12;\n    and.b32 flip, flip, 0xf0f0;\n"
    "    lop3.b32 pairs, $4, 0x0f0f, flip, 0xea;"
    + _LOOK_UP.format(first=0, second=2, up_first=12, up_second=4, **_TABLE)
    + "    shr.b32 flip, $4, 16;\n    and.b32 flip, flip, 0xf0f0;\n    shr.b32 pairs, $4, 4;\n"
    "    lop3.b32 pairs, pairs, 0x0f0f, flip, 0xea;"
    + _LOOK_UP.format(first=1, second=3, up_first=8, up_second=0, **_TABLE)
    + "    }"
)
HALVES = tl.constexpr(tuple(map(float, MAGNITUDES)))


@jit
def centroid(index):
    """fp16 centroids of indices in the low four bits of int16."""
    positive = (index & 8) != 0
    rank = tl.where(positive, index, ~index) & 7
    value = tl.full(index.shape, HALVES[0], tl.float16)
    for i in tl.static_range(1, 8):
        value = tl.where(rank == i, HALVES[i], value).to(tl.float16)
    return tl.where(positive, value, -value)


@jit
def load(a, b, a_rows, b_rows, mask, DIM: tl.constexpr, COLUMNS: tl.constexpr, ASM: tl.constexpr):
    """Rows as four fp16 tiles of centroids, turned values 4c … 4c + 3."""
    word = load_words(a, a_rows, mask, DIM // 4, COLUMNS)
    if ASM >= 80:
        return tl.inline_asm_elementwise(
            UNPACK,
            "=&r,=&r,=&r,=&r,r",
            [word],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return centroid(word), centroid(word >> 4), centroid(word >> 8), centroid(word >> 12)


TILE = Tile(
    load,
    split=4,
    codes={"codes": torch.int16},
    scale="scale",
    rotated=True,
    largest=largest(oracle.CENTROIDS),
)
