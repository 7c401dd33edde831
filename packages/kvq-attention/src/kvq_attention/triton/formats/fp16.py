"""fp16 in Triton's kernels; its bytes: `kvq_codecs.formats.fp16`."""

from __future__ import annotations

import torch
import triton.language as tl

from kvq_attention.triton.encode import Encoder, load_part, store_items
from kvq_attention.triton.jit import jit
from kvq_attention.triton.rounding import INFINITY_BITS, LARGEST_FP16, magnitude_bits, to_half
from kvq_attention.triton.tile import Tile
from kvq_attention.triton.words import load_words


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
    values = load_part(source, step, inside, 0, SPAN, BF16)
    magnitude = magnitude_bits(values)
    clamped = tl.minimum(tl.maximum(values, -LARGEST_FP16), LARGEST_FP16)
    values = tl.where(magnitude < INFINITY_BITS, clamped, values)
    store_items(planes[0], span * SPAN, to_half(values, magnitude > INFINITY_BITS), live)


ENCODER = Encoder(encode, spans=(8,))


@jit
def load(a, b, a_rows, b_rows, mask, DIM: tl.constexpr, COLUMNS: tl.constexpr, ASM: tl.constexpr):
    """Rows as one tile of fp16."""
    return (load_words(a, a_rows, mask, DIM, COLUMNS),)


TILE = Tile(load, split=1, codes={"values": torch.float16}, tokens=16)
