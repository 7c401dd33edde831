"""q4_0 in Triton's kernels; its bytes: `kvq_codecs.formats.q4_0`."""

from __future__ import annotations

import torch
import triton.language as tl

from kvq_attention.triton.encode import (
    Encoder,
    block_scale,
    load_parts,
    pack_nibbles,
    quotients,
    store_bytes,
    top_bits,
)
from kvq_attention.triton.jit import jit
from kvq_attention.triton.rounding import round_codes
from kvq_attention.triton.tile import Tile
from kvq_attention.triton.words import load_words
from kvq_codecs.blocks import BLOCK
from kvq_codecs.formats import q4_0 as oracle

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
        codes = codes + (pack_nibbles(code),)
    store_bytes(planes[0], span, codes, live)
    tl.store(planes[1] + span, scale, mask=live)


ENCODER = Encoder(encode, spans=(BLOCK,))


# Two int16 words hold codes 0 … 3 each. Under the exponent of 1024 the nibble n ^ 8 is the fp16
# number 1032 + code, or 1152 + 16 · code four bits higher; both differences are exact.
UNPACK = tl.constexpr(
    """{
    .reg .b32 high, magic, sixteenth, shifted;
    shr.b32 high, $4, 8;
    mov.b32 magic, 0x64086408;
    mov.b32 sixteenth, 0x2c002c00;
    mov.b32 shifted, 0xd480d480;
    lop3.b32 $0, $4, 0x000f000f, 0x64086408, 0x6a;
    lop3.b32 $1, $4, 0x00f000f0, 0x64806480, 0x6a;
    lop3.b32 $2, high, 0x000f000f, 0x64086408, 0x6a;
    lop3.b32 $3, high, 0x00f000f0, 0x64806480, 0x6a;
    sub.rn.f16x2 $0, $0, magic;
    fma.rn.f16x2 $1, $1, sixteenth, shifted;
    sub.rn.f16x2 $2, $2, magic;
    fma.rn.f16x2 $3, $3, sixteenth, shifted;
    }"""
)


@jit
def load(a, b, a_rows, b_rows, mask, DIM: tl.constexpr, COLUMNS: tl.constexpr, ASM: tl.constexpr):
    """Rows as four fp16 tiles of codes, values 4c … 4c + 3."""
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
    return (
        ((word << 12) >> 12).to(tl.float16),
        ((word << 8) >> 12).to(tl.float16),
        ((word << 4) >> 12).to(tl.float16),
        (word >> 12).to(tl.float16),
    )


TILE = Tile(load, split=4, codes={"codes": torch.int16}, scale="scale", largest=oracle.LARGEST)
