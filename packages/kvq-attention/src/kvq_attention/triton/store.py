"""The store kernel: K and V of a step are encoded and scattered into their slots in one launch.

Sizes: T tokens, Hkv heads, D values a row, P pages, N tokens a page. A thread encodes a span of a
row (see `encode`), a program the rows of TOKENS tokens × HEADS heads of K or of V. The first
programs are K's. Programs of neighbouring heads are neighbours, because their rows lie next to each
other in the source; neighbouring rows of a program are tokens, which lie so in the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvq_attention import launches
from kvq_attention.errors import UnsupportedError
from kvq_attention.triton import formats
from kvq_attention.triton.encode import Encoder
from kvq_attention.triton.jit import jit, kernel
from kvq_attention.triton.store_tiles import Config, Tile, pick_config
from kvq_attention.verify import check_rows
from kvq_codecs import Encoded

BACKEND = "triton"
SOURCES = (torch.float16, torch.bfloat16, torch.float32)


def store(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: Encoded,
    v_cache: Encoded,
    slot_mapping: torch.Tensor,
) -> None:
    """Write the step's rows: see `kvq_attention.ops.store`.

    Slots are not read on the host: what is outside [0, P · N) is not written, like −1.
    """
    launch(k, v, k_cache, v_cache, slot_mapping)


def launch(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: Encoded,
    v_cache: Encoded,
    slot_mapping: torch.Tensor,
    *,
    config: Config | None = None,
) -> None:
    """`store` with a launch of one's own choice."""
    num_tokens, num_heads, k_dim = k.shape
    v_dim = v.shape[2]
    if num_tokens == 0:
        return
    num_pages, _, page_tokens = k_cache.lead
    k_encoder, v_encoder = encoder_of(k_cache), encoder_of(v_cache)
    config = config or pick_config(k_encoder, v_encoder, k_dim, v_dim, num_heads)
    k_programs = _programs(config.k, num_tokens, num_heads)
    grid = (k_programs + _programs(config.v, num_tokens, num_heads),)
    _store[grid](
        _source("k", k),
        _source("v", v),
        k.stride(),
        v.stride(),
        slot_mapping,
        slot_mapping.stride(0),
        tuple(k_cache.planes.values()),
        tuple(v_cache.planes.values()),
        _table(k_encoder, k.device),
        _table(v_encoder, v.device),
        num_tokens,
        num_pages * page_tokens,
        k_programs,
        K_ENCODE=k_encoder.encode,
        V_ENCODE=v_encoder.encode,
        K_STRIDES=_strides("k_cache", k_cache),
        V_STRIDES=_strides("v_cache", v_cache),
        K_DIM=k_dim,
        V_DIM=v_dim,
        K_BF16=k.dtype == torch.bfloat16,
        V_BF16=v.dtype == torch.bfloat16,
        NUM_HEADS=num_heads,
        PAGE_TOKENS=page_tokens,
        K_TOKENS=config.k.tokens,
        V_TOKENS=config.v.tokens,
        K_HEADS=config.k.heads,
        V_HEADS=config.v.heads,
        K_SPAN=config.k.span,
        V_SPAN=config.v.span,
        num_warps=config.num_warps,
        enable_fp_fusion=False,
        **_register_limit(k_encoder, v_encoder),
    )
    launches.record(BACKEND, "store")


def encoder_of(cache: Encoded) -> Encoder:
    """The encoder of a cache's format."""
    encoder: Encoder = formats.get(cache.spec.name).ENCODER
    return encoder


def _programs(tile: Tile, num_tokens: int, num_heads: int) -> int:
    return -(-num_tokens // tile.tokens) * -(-num_heads // tile.heads)


def _source(name: str, source: torch.Tensor) -> torch.Tensor:
    if source.dtype not in SOURCES:
        allowed = ", ".join(map(str, SOURCES))
        raise UnsupportedError(
            f"{name} is {source.dtype}, which the triton backend does not store: it has {allowed}; "
            "the reference backend has it"
        )
    values = source.detach().resolve_neg()
    # The interpreter mistakes subnormal bf16 values: the kernel widens the bits itself.
    return values.view(torch.int16) if values.dtype == torch.bfloat16 else values


def _strides(name: str, cache: Encoded) -> tuple[tuple[int, ...], ...]:
    """(page, head, token) of each plane, in its items."""
    for plane, array in cache.planes.items():
        check_rows(f"plane {plane!r} of {name}", array)
    return tuple(array.stride()[:3] for array in cache.planes.values())


def _table(encoder: Encoder, device: torch.device) -> torch.Tensor | None:
    return None if encoder.table is None else encoder.table(device)


def _register_limit(*encoders: Encoder) -> dict[str, int]:
    """An option that Triton knows for NVIDIA alone."""
    limits = [e.max_registers for e in encoders if e.max_registers is not None]
    return {"maxnreg": max(limits)} if limits and torch.version.hip is None else {}


@jit
def _store_tile(
    program,
    source,
    source_strides,
    slots,
    slots_stride,
    planes,
    table,
    num_tokens,
    num_slots,
    ENCODE: tl.constexpr,
    STRIDES: tl.constexpr,
    DIM: tl.constexpr,
    BF16: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    SPAN: tl.constexpr,
):
    ROW_SPANS: tl.constexpr = triton.next_power_of_2(DIM // SPAN)
    HEAD_TILES: tl.constexpr = triton.cdiv(NUM_HEADS, HEADS)
    index = tl.arange(0, TOKENS * HEADS * ROW_SPANS)
    span = index % ROW_SPANS
    token = program // HEAD_TILES * TOKENS + index // ROW_SPANS % TOKENS
    head = (program % HEAD_TILES * HEADS + index // (ROW_SPANS * TOKENS)).to(tl.int64)
    inside = span < DIM // SPAN
    exists = inside & (token < num_tokens) & (head < NUM_HEADS)
    # Threads beyond the last row read it, too: zeros would be divided the slow way, which takes
    # a step of one token longer than all else.
    token = tl.minimum(token, num_tokens - 1).to(tl.int64)
    head = tl.minimum(head, NUM_HEADS - 1)

    slot = tl.load(slots + token * slots_stride, mask=exists, other=-1)
    live = exists & (slot >= 0) & (slot < num_slots)
    slot = tl.where(live, slot, 0).to(tl.uint64)
    page = (slot // PAGE_TOKENS).to(tl.int64)
    offset = (slot % PAGE_TOKENS).to(tl.int64)
    rows = ()
    for i in tl.static_range(len(planes)):
        row = page * STRIDES[i][0] + (head * STRIDES[i][1] + offset * STRIDES[i][2])
        rows = rows + (planes[i] + row,)

    row = token * source_strides[0] + head * source_strides[1]
    first = row + span.to(tl.int64) * SPAN * source_strides[2]
    step = source_strides[2]
    # Reading does not wait for the slots: a row that is not stored is a row all the same.
    ENCODE(source + first, step, inside, live, rows, span, table, DIM, SPAN, BF16)


@kernel(do_not_specialize=["num_tokens", "num_slots", "k_programs"])
def _store(
    k,
    v,
    k_strides,
    v_strides,
    slots,
    slots_stride,
    k_planes,
    v_planes,
    k_table,
    v_table,
    num_tokens,
    num_slots,
    k_programs,
    K_ENCODE: tl.constexpr,
    V_ENCODE: tl.constexpr,
    K_STRIDES: tl.constexpr,
    V_STRIDES: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_BF16: tl.constexpr,
    V_BF16: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    K_TOKENS: tl.constexpr,
    V_TOKENS: tl.constexpr,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K_SPAN: tl.constexpr,
    V_SPAN: tl.constexpr,
):
    program = tl.program_id(0)
    if program < k_programs:
        _store_tile(
            program,
            k,
            k_strides,
            slots,
            slots_stride,
            k_planes,
            k_table,
            num_tokens,
            num_slots,
            K_ENCODE,
            K_STRIDES,
            K_DIM,
            K_BF16,
            NUM_HEADS,
            PAGE_TOKENS,
            K_TOKENS,
            K_HEADS,
            K_SPAN,
        )
    else:
        _store_tile(
            program - k_programs,
            v,
            v_strides,
            slots,
            slots_stride,
            v_planes,
            v_table,
            num_tokens,
            num_slots,
            V_ENCODE,
            V_STRIDES,
            V_DIM,
            V_BF16,
            NUM_HEADS,
            PAGE_TOKENS,
            V_TOKENS,
            V_HEADS,
            V_SPAN,
        )
