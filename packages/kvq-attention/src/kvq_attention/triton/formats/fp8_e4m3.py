"""fp8_e4m3 in Triton's kernels; its bytes: `kvq_codecs.formats.fp8_e4m3`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvq_attention.triton.encode import (
    BLOCK,
    Encoder,
    block_quotients,
    join_blocks,
    load_values,
    store_items,
)
from kvq_attention.triton.rounding import encode_minifloat, minifloat
from kvq_attention.triton.tile import Tile
from kvq_attention.triton.words import load_e4m3
from kvq_codecs.minifloat import E4M3

LARGEST = tl.constexpr(E4M3.largest)
KIND = tl.constexpr(minifloat(E4M3))


@triton.jit
def encode(source, step, live, planes, table, DIM: tl.constexpr, BF16: tl.constexpr):
    """Encode a tile of rows: see `kvq_attention.triton.encode`."""
    values = load_values(source, step, live, DIM, BF16)
    quotients, scale = block_quotients(values, LARGEST)
    codes = encode_minifloat(join_blocks(quotients), KIND)
    store_items(planes[0], codes.to(tl.uint8), live, DIM)
    store_items(planes[1], scale, live, DIM // BLOCK)


ENCODER = Encoder(encode)


@triton.jit
def load(a, b, a_rows, b_rows, mask, DIM: tl.constexpr, COLUMNS: tl.constexpr, ASM: tl.constexpr):
    """Rows as two fp16 tiles of codes · 2⁻⁸, even and odd values."""
    return load_e4m3(a, a_rows, mask, DIM, COLUMNS, ASM)


TILE = Tile(load, split=2, codes={"codes": torch.int16}, scale="scale", factor=256.0)
