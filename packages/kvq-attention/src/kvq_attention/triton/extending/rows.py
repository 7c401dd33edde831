"""Tiles of whole rows, in their order: of packed tokens and of a step's own."""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_attention.triton.jit import jit
from kvq_attention.triton.paging import rows_of
from kvq_attention.triton.rotation import turn
from kvq_attention.triton.words import load


@jit
def interleave(even, odd):
    """Columns even[0], odd[0], even[1], …: [rows, 2 · columns]."""
    return tl.reshape(tl.join(even, odd), (even.shape[0], 2 * even.shape[1]))


@jit
def join_tiles(tiles, FIRST: tl.constexpr, STEP: tl.constexpr, SPLIT: tl.constexpr):
    """Tiles FIRST, FIRST + STEP, … of a split row as one, in the row's order."""
    if STEP == SPLIT:
        whole = tiles[FIRST]
    else:
        whole = interleave(
            join_tiles(tiles, FIRST, 2 * STEP, SPLIT),
            join_tiles(tiles, FIRST + STEP, 2 * STEP, SPLIT),
        )
    return whole


@jit
def turn_rows(rows, turns, BACK: tl.constexpr, DTYPE: tl.constexpr):
    """iso's turned rows, or BACK, of whole rows [rows, values]."""
    QUADS: tl.constexpr = rows.shape[1] // 4
    even, odd = tl.split(tl.reshape(rows, (rows.shape[0], QUADS, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    turned = turn((a, b, c, d), turns, QUADS, 4, BACK, DTYPE, True)
    return join_tiles(turned, 0, 1, 4)


@jit
def load_scales(
    planes,
    pages,
    page,
    token,
    head,
    inside,
    SCALES: tl.constexpr,
    WORD: tl.constexpr,
    STRIDES: tl.constexpr,
    PAGE: tl.constexpr,
):
    """The scales of tokens' rows, float32 [tokens, SCALES up to a power of two]; others are 0."""
    rows = rows_of(page, token, head, pages, STRIDES, 2, PAGE)
    BLOCKS: tl.constexpr = triton.next_power_of_2(SCALES)
    block = tl.arange(0, BLOCKS)
    if WORD:
        word = load(planes[2] + rows, inside)
        field = (word[:, None] >> (block * 16).to(word.dtype)[None, :]).to(tl.int16)
        scale = field.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        there = (block < SCALES)[None, :]
        if inside is not None:
            there = there & inside[:, None]
        scale = load(planes[2] + rows[:, None] + block[None, :], there).to(tl.float32)
    return scale


@jit
def shares(scale):
    """Scales [tokens, blocks] to a power of two of each token: fp16, and the powers, float32."""
    bits = scale.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    exponent = tl.max(bits, 1) >> 23
    broken = exponent == 255
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    share = tl.where(broken[:, None], 0.0, scale * inverse[:, None]).to(tl.float16)
    power = (exponent << 23).to(tl.float32, bitcast=True)
    return share, tl.where(broken, float("nan"), power)


@jit
def load_past(
    planes,
    pages,
    page,
    token,
    head,
    inside,
    LOAD: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    SCALES: tl.constexpr,
    WORD: tl.constexpr,
    STRIDES: tl.constexpr,
    PAGE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Packed rows of tokens, and what each is still to be multiplied by, float32 [tokens].

    Of several scales a row, the tile has what they are to a power of two that all of them share:
    fp16 holds that, whatever the scales, and a scale that is no number spoils the factor alone.
    """
    a_rows = rows_of(page, token, head, pages, STRIDES, 0, PAGE)
    b_rows = rows_of(page, token, head, pages, STRIDES, 1, PAGE)
    tiles = LOAD(planes[0], planes[1], a_rows, b_rows, inside, DIM, COLUMNS, ASM)
    rows = join_tiles(tiles, 0, 1, SPLIT)
    factor = tl.zeros([token.shape[0]], tl.float32)
    if SCALES > 0:
        if SCALES == 1:
            s_rows = rows_of(page, token, head, pages, STRIDES, 2, PAGE)
            factor = load(planes[2] + s_rows, inside).to(tl.float32)
        else:
            share, factor = shares(
                load_scales(planes, pages, page, token, head, inside, SCALES, WORD, STRIDES, PAGE)
            )
            BLOCKS: tl.constexpr = share.shape[1]
            shape: tl.constexpr = (rows.shape[0], BLOCKS, rows.shape[1] // BLOCKS)
            rows = rows.to(tl.float16)
            rows *= tl.reshape(tl.broadcast_to(share[:, :, None], shape), rows.shape)
    return rows, factor


@jit
def load_own(
    rows, stride, token, last, MASKED: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr
):
    """Rows [tokens, WIDTH] of own tokens, 0 from token `last` on where MASKED."""
    column = tl.arange(0, WIDTH)
    pointer = rows + token.to(tl.int64)[:, None] * stride + column[None, :]
    if MASKED:
        there = (token < last)[:, None]
        if WIDTH != DIM:
            there = there & (column < DIM)[None, :]
        tile = tl.load(pointer, mask=there, other=0.0)
    elif WIDTH != DIM:
        tile = tl.load(pointer, mask=(column < DIM)[None, :], other=0.0)
    else:
        tile = tl.load(pointer)
    return tile
