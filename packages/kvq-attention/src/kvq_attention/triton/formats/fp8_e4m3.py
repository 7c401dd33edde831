"""fp8_e4m3 in Triton's kernels; its bytes: `kvq_codecs.formats.fp8_e4m3`."""

from __future__ import annotations

import torch
import triton.language as tl

from kvq_attention.triton.encode import (
    Encoder,
    block_scale,
    load_parts,
    quotients,
    store_bytes,
    top_bits,
)
from kvq_attention.triton.jit import jit
from kvq_attention.triton.rounding import encode_minifloat, minifloat
from kvq_attention.triton.tile import Tile
from kvq_attention.triton.words import load_e4m3
from kvq_codecs.blocks import BLOCK
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
    parts = load_parts(source, step, inside, SPAN, BF16)
    scale, divisor, alive = block_scale(top_bits(parts), LARGEST)
    codes = ()
    for i in tl.static_range(len(parts)):
        code = encode_minifloat(quotients(parts[i], divisor, alive), KIND)
        codes = codes + (code.to(tl.uint8),)
    store_bytes(planes[0], span, codes, live)
    tl.store(planes[1] + span, scale, mask=live)


ENCODER = Encoder(encode, spans=(BLOCK,))


@jit
def load(a, b, a_rows, b_rows, mask, DIM: tl.constexpr, COLUMNS: tl.constexpr, ASM: tl.constexpr):
    """Rows as two fp16 tiles, even and odd values."""
    return load_e4m3(a, a_rows, mask, DIM, COLUMNS, ASM)


TILE = Tile(load, split=2, codes={"codes": torch.int16}, scale="scale", largest=E4M3.largest)
