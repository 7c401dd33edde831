"""nvfp4 in Triton's kernels; its bytes: `kvq_codecs.formats.nvfp4`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvq_attention.triton.encode import (
    Encoder,
    load_parts,
    pack_nibbles,
    quotients,
    row_scale,
    store_bytes,
    top_bits,
    top_of_rows,
)
from kvq_attention.triton.jit import jit
from kvq_attention.triton.rounding import (
    decode_minifloat,
    encode_minifloat,
    minifloat,
    or_nan,
)
from kvq_attention.triton.tile import Tile
from kvq_attention.triton.words import half_of_e4m3, load_words
from kvq_codecs.formats import nvfp4 as oracle
from kvq_codecs.minifloat import E2M1, E4M3

BLOCK = tl.constexpr(oracle.BLOCK)
LARGEST_CODE = tl.constexpr(E2M1.largest)
LARGEST = tl.constexpr(E4M3.largest * E2M1.largest)
CODE = tl.constexpr(minifloat(E2M1))
SCALE = tl.constexpr(minifloat(E4M3))
SCALE_NAN = tl.constexpr((1 << E4M3.sign_shift) - 1)


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
    for i in tl.static_range(SPAN // BLOCK):
        top = tl.where(finite, top_bits((parts[2 * i], parts[2 * i + 1])), 0)
        block_code = encode_minifloat(
            tl.div_rn(top.to(tl.float32, bitcast=True), scale * LARGEST_CODE), SCALE
        )
        width = decode_minifloat(block_code, SCALE) * scale
        # x / infinity is a zero of x's sign.
        width = tl.where(width == 0, float("inf"), width)
        for j in tl.static_range(2):
            code = encode_minifloat(quotients(parts[2 * i + j], width, finite), CODE)
            codes = codes + (pack_nibbles(code),)
        block_code = tl.where(finite, block_code, SCALE_NAN).to(tl.uint8)
        tl.store(planes[1] + (span * (SPAN // BLOCK) + i), block_code, mask=live)
    store_bytes(planes[0], span, codes, live)
    tl.store(planes[2], or_nan(scale, finite), mask=live & (span == 0))


ENCODER = Encoder(encode, spans=(2 * oracle.BLOCK, oracle.BLOCK))


SPAN = tl.constexpr(oracle.BLOCK)

# Two int16 words hold codes 0 … 3 each. A code's sign goes to bit 15 of its half, exponent and
# mantissa to bits 11 … 9: fp16 · 2⁻¹⁴, subnormals too.
UNPACK = tl.constexpr(
    """{
    .reg .b32 a, b;
    shl.b32 a, $4, 12;
    shl.b32 b, $4, 9;
    and.b32 b, b, 0x0e000e00;
    lop3.b32 $0, a, 0x80008000, b, 0xea;
    shl.b32 a, $4, 8;
    shl.b32 b, $4, 5;
    and.b32 b, b, 0x0e000e00;
    lop3.b32 $1, a, 0x80008000, b, 0xea;
    shl.b32 a, $4, 4;
    shl.b32 b, $4, 1;
    and.b32 b, b, 0x0e000e00;
    lop3.b32 $2, a, 0x80008000, b, 0xea;
    shr.b32 b, $4, 3;
    and.b32 b, b, 0x0e000e00;
    lop3.b32 $3, $4, 0x80008000, b, 0xea;
    }"""
)

# e4m3 codes in int16 as fp16 · 2⁶
WIDEN = tl.constexpr(
    """{
    .reg .b32 a, b, power;
    mov.b32 power, 0x74007400;
    shl.b32 a, $1, 8;
    shl.b32 b, $1, 7;
    and.b32 b, b, 0x3f803f80;
    lop3.b32 a, a, 0x80008000, b, 0xea;
    mul.rn.f16x2 $0, a, power;
    }"""
)


@jit
def half_of_e2m1(codes):
    """e2m1 codes in the low four bits of int16 as fp16 · 2⁻¹⁴, exactly."""
    bits = ((codes & 8) << 12) | ((codes & 7) << 9)
    return bits.to(tl.float16, bitcast=True)


@jit
def load(a, b, a_rows, b_rows, mask, DIM: tl.constexpr, COLUMNS: tl.constexpr, ASM: tl.constexpr):
    """Rows as four fp16 tiles of code · block scale · 2⁻⁸, values 4c … 4c + 3.

    A code has two significant bits and a scale four, so their product is exact in fp16.
    """
    word = load_words(a, a_rows, mask, DIM // 4, COLUMNS)
    code = load_words(b, b_rows, mask, DIM // SPAN, COLUMNS * 4 // SPAN)
    shape: tl.constexpr = (code.shape[0], code.shape[1], SPAN // 4)
    code = tl.reshape(tl.broadcast_to(code.to(tl.int16)[:, :, None], shape), (shape[0], COLUMNS))
    if ASM >= 80:
        scale = tl.inline_asm_elementwise(
            WIDEN, "=&r,r", [code], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        scale = half_of_e4m3(code) * 16384.0
    if ASM >= 80:
        x0, x1, x2, x3 = tl.inline_asm_elementwise(
            UNPACK,
            "=&r,=&r,=&r,=&r,r",
            [word],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        x0, x1 = half_of_e2m1(word), half_of_e2m1(word >> 4)
        x2, x3 = half_of_e2m1(word >> 8), half_of_e2m1(word >> 12)
    return x0 * scale, x1 * scale, x2 * scale, x3 * scale


TILE = Tile(
    load,
    split=4,
    codes={"codes": torch.int16, "block_scale": torch.uint8},
    scale="row_scale",
    factor=256.0,
    largest=E4M3.largest * E2M1.largest,
)
