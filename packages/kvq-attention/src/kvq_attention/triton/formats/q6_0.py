"""q6_0 in Triton's kernels; its bytes: `kvq_codecs.formats.q6_0`."""

from __future__ import annotations

import torch
import triton.language as tl

from kvq_attention.triton.encode import (
    Encoder,
    block_scale,
    load_parts,
    pack_crumbs,
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
from kvq_codecs.formats import q6_0 as oracle

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
    low = ()
    high = ()
    for i in tl.static_range(len(parts)):
        code = round_codes(quotients(parts[i], divisor, alive), LOWEST, HIGHEST)
        low = low + (pack_nibbles(code),)
        high = high + (pack_crumbs(code >> 4),)
    store_bytes(planes[0], span, low, live)
    store_bytes(planes[1], span, high, live)
    tl.store(planes[2] + span, scale, mask=live)


ENCODER = Encoder(encode, spans=(BLOCK,))


# Two int16 words hold the low four bits of codes 0 … 3 each, two more the high two. Under the
# exponent of 1024 the six bits ^ 32 are the fp16 number 1056 + code; the difference is exact.
UNPACK = tl.constexpr(
    """{
    .reg .b32 low, high, magic;
    mov.b32 magic, 0x64206420;
    shl.b32 high, $5, 4;
    and.b32 low, $4, 0x000f000f;
    lop3.b32 high, high, 0x00300030, low, 0xea;
    xor.b32 $0, high, 0x64206420;
    shl.b32 high, $5, 2;
    shr.b32 low, $4, 4;
    and.b32 low, low, 0x000f000f;
    lop3.b32 high, high, 0x00300030, low, 0xea;
    xor.b32 $1, high, 0x64206420;
    shr.b32 low, $4, 8;
    and.b32 low, low, 0x000f000f;
    lop3.b32 high, $5, 0x00300030, low, 0xea;
    xor.b32 $2, high, 0x64206420;
    shr.b32 high, $5, 2;
    shr.b32 low, $4, 12;
    and.b32 low, low, 0x000f000f;
    lop3.b32 high, high, 0x00300030, low, 0xea;
    xor.b32 $3, high, 0x64206420;
    sub.rn.f16x2 $0, $0, magic;
    sub.rn.f16x2 $1, $1, magic;
    sub.rn.f16x2 $2, $2, magic;
    sub.rn.f16x2 $3, $3, magic;
    }"""
)


@jit
def join(low, high):
    """Six bits, four in `low` and two at bits 4 and 5 of `high`, as a signed fp16 number."""
    code = (low & 15) | (high & 48)
    return ((code ^ 32) - 32).to(tl.float16)


@jit
def load(a, b, a_rows, b_rows, mask, DIM: tl.constexpr, COLUMNS: tl.constexpr, ASM: tl.constexpr):
    """Rows as four fp16 tiles of codes, values 4c … 4c + 3."""
    low = load_words(a, a_rows, mask, DIM // 4, COLUMNS)
    high = load_words(b, b_rows, mask, DIM // 4, COLUMNS).to(tl.int16)
    if ASM >= 80:
        return tl.inline_asm_elementwise(
            UNPACK,
            "=&r,=&r,=&r,=&r,r,r",
            [low, high],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return (
        join(low, high << 4),
        join(low >> 4, high << 2),
        join(low >> 8, high),
        join(low >> 12, high >> 2),
    )


TILE = Tile(
    load,
    split=4,
    codes={"low": torch.int16, "high": torch.uint8},
    scale="scale",
    largest=oracle.LARGEST,
)
