"""q8_0 in Triton's kernels; its bytes: `kvq_codecs.formats.q8_0`."""

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
from kvq_attention.triton.rounding import round_codes
from kvq_attention.triton.tile import Tile
from kvq_attention.triton.words import load_words
from kvq_codecs.blocks import BLOCK
from kvq_codecs.formats import q8_0 as oracle

LARGEST = tl.constexpr(oracle.LARGEST)
LOWEST = tl.constexpr(oracle.LOWEST)
HIGHEST = tl.constexpr(oracle.HIGHEST)


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
        code = round_codes(quotients(parts[i], divisor, alive), LOWEST, HIGHEST)
        codes = codes + (code.to(tl.uint8),)
    store_bytes(planes[0], span, codes, live)
    tl.store(planes[1] + span, scale, mask=live)


ENCODER = Encoder(encode, spans=(BLOCK,))


# Two int16 words hold codes 0 … 3. x ^ 0x80 is code + 128; under the high byte 0x64 it is the
# fp16 number 1152 + code, and the difference is exact.
UNPACK = tl.constexpr(
    """{
    .reg .b32 a, magic;
    xor.b32 a, $2, 0x80808080;
    mov.b32 magic, 0x64806480;
    prmt.b32 $0, a, 0x64646464, 0x4240;
    prmt.b32 $1, a, 0x64646464, 0x4341;
    sub.rn.f16x2 $0, $0, magic;
    sub.rn.f16x2 $1, $1, magic;
    }"""
)


@jit
def load(a, b, a_rows, b_rows, mask, DIM: tl.constexpr, COLUMNS: tl.constexpr, ASM: tl.constexpr):
    """Rows as two fp16 tiles of codes, even and odd values."""
    word = load_words(a, a_rows, mask, DIM // 2, COLUMNS)
    if ASM >= 80:
        return tl.inline_asm_elementwise(
            UNPACK, "=&r,=&r,r", [word], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    return ((word << 8) >> 8).to(tl.float16), (word >> 8).to(tl.float16)


TILE = Tile(load, split=2, codes={"codes": torch.int16}, scale="scale", largest=oracle.LARGEST)
