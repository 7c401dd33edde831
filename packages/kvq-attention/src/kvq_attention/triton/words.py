"""Tiles of words, the items of a code plane, and the bit patterns that several formats share."""

from __future__ import annotations

import triton.language as tl

from kvq_attention.triton.jit import jit


@jit
def load(pointer, mask):
    """What lies there, 0 where mask is false; mask None = everywhere."""
    if mask is None:
        return tl.load(pointer)
    else:
        return tl.load(pointer, mask=mask, other=0)


@jit
def load_words(plane, rows, mask, ITEMS: tl.constexpr, COLUMNS: tl.constexpr):
    """Items [tokens, COLUMNS] of rows; 0 where mask is false and from column ITEMS on.

    mask None = every row is there.
    """
    column = tl.arange(0, COLUMNS)
    pointer = plane + rows[:, None] + column[None, :]
    if ITEMS != COLUMNS:
        inside = (column < ITEMS)[None, :]
        if mask is not None:
            inside = inside & mask[:, None]
        words = load(pointer, inside)
    elif mask is not None:
        words = load(pointer, mask[:, None])
    else:
        words = tl.load(pointer)
    return words


@jit
def half_of_e4m3(codes):
    """e4m3 codes in int16 as fp16 · 2⁻⁸: the exponent keeps its place's weight, off by 8.

    Exact, subnormals too. The NaN codes 0x7F and 0xFF become ±480 · 2⁻⁸.
    """
    bits = ((codes & 0x80) << 8) | ((codes & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True)


# Two int16 words hold bytes 0 … 3; the fp16 pairs are bytes (0, 2) and (1, 3).
CONVERT = tl.constexpr(
    """{
    .reg .b32 t;
    .reg .b16 even, odd;
    prmt.b32 t, $2, 0, 0x3120;
    mov.b32 {even, odd}, t;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
    }"""
)
# sm_89 brought that conversion; before it the bits are moved, which gives the values · 2⁻⁸.
MOVE = tl.constexpr(
    """{
    .reg .b32 a, b, two_to_8;
    mov.b32 two_to_8, 0x5c005c00;
    shl.b32 a, $2, 8;
    shr.b32 b, a, 1;
    and.b32 b, b, 0x3f803f80;
    lop3.b32 $0, a, 0x80008000, b, 0xea;
    shr.b32 b, $2, 1;
    and.b32 b, b, 0x3f803f80;
    lop3.b32 $1, $2, 0x80008000, b, 0xea;
    mul.rn.f16x2 $0, $0, two_to_8;
    mul.rn.f16x2 $1, $1, two_to_8;
    }"""
)


@jit
def load_e4m3(plane, rows, mask, DIM: tl.constexpr, COLUMNS: tl.constexpr, ASM: tl.constexpr):
    """Rows of e4m3 codes as two fp16 tiles, even and odd values.

    The NaN codes 0x7F and 0xFF may read as ±480; no encoder writes them.
    """
    word = load_words(plane, rows, mask, DIM // 2, COLUMNS)
    if ASM >= 80:
        return tl.inline_asm_elementwise(
            CONVERT if ASM >= 89 else MOVE,
            "=&r,=&r,r",
            [word],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return half_of_e4m3(word) * 256.0, half_of_e4m3(word >> 8) * 256.0
