"""bf16 in Triton's kernels; its bytes: `kvq_codecs.formats.bf16`."""

from __future__ import annotations

import torch
import triton.language as tl

from kvq_attention.triton.encode import Encoder, load_part, store_items
from kvq_attention.triton.jit import jit
from kvq_attention.triton.rounding import to_bf16
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
    store_items(planes[0], span * SPAN, to_bf16(values), live)


ENCODER = Encoder(encode, spans=(8,))


@jit
def load(a, b, a_rows, b_rows, mask, DIM: tl.constexpr, COLUMNS: tl.constexpr, ASM: tl.constexpr):
    """Rows as one tile of bf16."""
    return (load_words(a, a_rows, mask, DIM, COLUMNS),)


TILE = Tile(load, split=1, codes={"values": torch.bfloat16}, tokens=16)
