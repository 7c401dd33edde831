"""fp8 in Triton's kernels; its bytes: `kvq_codecs.formats.fp8`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvq_attention.triton.encode import Encoder, load_values, row_scale, store_items
from kvq_attention.triton.rounding import (
    divide,
    encode_minifloat,
    magnitude_bits,
    minifloat,
    or_nan,
)
from kvq_attention.triton.tile import Tile
from kvq_attention.triton.words import load_e4m3
from kvq_codecs.minifloat import E4M3

LARGEST = tl.constexpr(E4M3.largest)
KIND = tl.constexpr(minifloat(E4M3))


@triton.jit
def encode(source, step, live, planes, table, DIM: tl.constexpr, BF16: tl.constexpr):
    """Encode a tile of rows: see `kvq_attention.triton.encode`."""
    values = load_values(source, step, live, DIM, BF16)
    scale, finite = row_scale(tl.max(magnitude_bits(values), 1), LARGEST)
    quotients = divide(tl.where(finite[:, None], values, 0.0), scale[:, None])
    store_items(planes[0], encode_minifloat(quotients, KIND).to(tl.uint8), live, DIM)
    tl.store(planes[1], or_nan(scale, finite), mask=live)


ENCODER = Encoder(encode)


@triton.jit
def load(a, b, a_rows, b_rows, mask, DIM: tl.constexpr, COLUMNS: tl.constexpr, ASM: tl.constexpr):
    """Rows as two fp16 tiles of codes · 2⁻⁸, even and odd values."""
    return load_e4m3(a, a_rows, mask, DIM, COLUMNS, ASM)


TILE = Tile(load, split=2, codes={"codes": torch.int16}, scale="row_scale", factor=256.0)
