"""Tiles of words, the items of a code plane, and the bit patterns that several formats share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_words(plane, rows, mask, ITEMS: tl.constexpr, COLUMNS: tl.constexpr):
    """Items [tokens, COLUMNS] of rows; 0 where mask is false and from column ITEMS on."""
    column = tl.arange(0, COLUMNS)
    inside = mask[:, None]
    if ITEMS != COLUMNS:
        inside = inside & (column < ITEMS)[None, :]
    return tl.load(plane + rows[:, None] + column[None, :], mask=inside, other=0)


@triton.jit
def half_of_e4m3(codes):
    """e4m3 codes in int16 as fp16 · 2⁻⁸: the exponent keeps its place's weight, off by 8.

    Exact, subnormals too. The NaN codes 0x7F and 0xFF become ±480 · 2⁻⁸.
    """
    bits = ((codes & 0x80) << 8) | ((codes & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True)


# Two int16 words hold bytes 0 … 3; the fp16 pairs are bytes (0, 2) and (1, 3).
E4M3_ASM: tl.constexpr = tl.constexpr(
    """{
    .reg .b32 a, b;
    shl.b32 a, $2, 8;
    shr.b32 b, a, 1;
    and.b32 b, b, 0x3f803f80;
    lop3.b32 $0, a, 0x80008000, b, 0xea;
    shr.b32 b, $2, 1;
    and.b32 b, b, 0x3f803f80;
    lop3.b32 $1, $2, 0x80008000, b, 0xea;
    }"""
)


@triton.jit
def load_e4m3(plane, rows, mask, DIM: tl.constexpr, COLUMNS: tl.constexpr, ASM: tl.constexpr):
    """Rows of e4m3 codes as two fp16 tiles, even and odd values · 2⁻⁸."""
    word = load_words(plane, rows, mask, DIM // 2, COLUMNS)
    if ASM:
        return tl.inline_asm_elementwise(
            E4M3_ASM, "=&r,=&r,r", [word], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    return half_of_e4m3(word), half_of_e4m3(word >> 8)
