"""fp8 in Triton's kernels; its bytes: `kvq_codecs.formats.fp8`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvq_attention.triton.encode import (
    Encoder,
    load_parts,
    quotients,
    row_scale,
    store_bytes,
    top_bits,
    top_of_rows,
)
from kvq_attention.triton.jit import jit
from kvq_attention.triton.rounding import (
    encode_minifloat,
    minifloat,
    or_nan,
)
from kvq_attention.triton.tile import Tile
from kvq_attention.triton.words import load_e4m3
from kvq_codecs.minifloat import E4M3

LARGEST = tl.constexpr(E4M3.largest)
KIND = tl.constexpr(minifloat(E4M3))


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
    ROW: tl.constexpr = triton.next_power_of_2(DIM // SPAN)
    parts = load_parts(source, step, inside, SPAN, BF16)
    scale, finite = row_scale(top_of_rows(top_bits(parts), ROW), LARGEST)
    codes = ()
    for i in tl.static_range(len(parts)):
        code = encode_minifloat(quotients(parts[i], scale, finite), KIND)
        codes = codes + (code.to(tl.uint8),)
    store_bytes(planes[0], span, codes, live)
    tl.store(planes[1], or_nan(scale, finite), mask=live & (span == 0))


ENCODER = Encoder(encode, spans=(32, 16))


@jit
def load(a, b, a_rows, b_rows, mask, DIM: tl.constexpr, COLUMNS: tl.constexpr, ASM: tl.constexpr):
    """Rows as two fp16 tiles, even and odd values."""
    return load_e4m3(a, a_rows, mask, DIM, COLUMNS, ASM)


TILE = Tile(load, split=2, codes={"codes": torch.int16}, scale="row_scale", largest=E4M3.largest)
