"""The store kernel: K and V of a step are encoded and scattered into their slots in one launch.

Sizes: T tokens, Hkv heads, D values a row, P pages, N tokens a page. A program encodes a tile of
TOKENS tokens × HEADS heads of K or of V; the first programs are K's. Programs of neighbouring
heads are neighbours, because their rows lie next to each other in the source.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvq_attention import launches
from kvq_attention.errors import TensorError, UnsupportedError
from kvq_attention.triton import formats
from kvq_attention.triton.encode import Encoder
from kvq_codecs import Encoded

WARP = 32
# Values of a row that a thread of a tile has: 16 bytes of a 16-bit source.
THREAD_VALUES = 8
BACKEND = "triton"
SOURCES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class Tile:
    """The rows of a program: powers of two."""

    tokens: int
    heads: int = 1


@dataclass(frozen=True, slots=True)
class Config:
    """How the launch is cut: the tiles of K and of V, and the warps of a program."""

    k: Tile
    v: Tile
    num_warps: int


def pick_tile(encoder: Encoder, dim: int, num_heads: int, num_warps: int) -> Tile:
    """The tile of one source: each thread has THREAD_VALUES values, or a row if it is serial.

    A serial tile spans heads where they are a multiple of a power of two, so that the rows of
    neighbouring threads are neighbours in the source.
    """
    threads = WARP * num_warps
    if not encoder.serial:
        return Tile(max(1, threads * THREAD_VALUES // triton.next_power_of_2(dim)))
    heads = min(num_heads & -num_heads, threads)
    return Tile(threads // heads, heads)


def pick_config(k: Encoder, v: Encoder, k_dim: int, v_dim: int, num_heads: int) -> Config:
    """The launch for two formats."""
    num_warps = 4
    return Config(
        pick_tile(k, k_dim, num_heads, num_warps),
        pick_tile(v, v_dim, num_heads, num_warps),
        num_warps,
    )


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
        _strides("k_cache", k_cache),
        _strides("v_cache", v_cache),
        _table(k_encoder, k.device),
        _table(v_encoder, v.device),
        num_tokens,
        num_heads,
        num_pages * page_tokens,
        k_programs,
        K_ENCODE=k_encoder.encode,
        V_ENCODE=v_encoder.encode,
        K_DIM=k_dim,
        V_DIM=v_dim,
        K_BF16=k.dtype == torch.bfloat16,
        V_BF16=v.dtype == torch.bfloat16,
        PAGE_TOKENS=page_tokens,
        K_TOKENS=config.k.tokens,
        K_HEADS=config.k.heads,
        V_TOKENS=config.v.tokens,
        V_HEADS=config.v.heads,
        num_warps=config.num_warps,
        enable_fp_fusion=False,
    )
    launches.record(BACKEND, "store")


def encoder_of(cache: Encoded) -> Encoder:
    """The encoder of a cache's format."""
    encoder: Encoder = formats.get(cache.spec.name).ENCODER
    return encoder


def _programs(tile: Tile, num_tokens: int, num_heads: int) -> int:
    return triton.cdiv(num_tokens, tile.tokens) * triton.cdiv(num_heads, tile.heads)


def _source(name: str, source: torch.Tensor) -> torch.Tensor:
    if source.dtype not in SOURCES:
        allowed = ", ".join(map(str, SOURCES))
        raise UnsupportedError(
            f"{name} is {source.dtype}, which the triton backend does not store: it has {allowed}; "
            "the reference backend has it"
        )
    # The interpreter mistakes subnormal bf16 values: the kernel widens the bits itself.
    return source.view(torch.int16) if source.dtype == torch.bfloat16 else source


def _strides(name: str, cache: Encoded) -> tuple[tuple[int, ...], ...]:
    """(page, head, token) of each plane, in its items."""
    for plane, array in cache.planes.items():
        if array.stride(3) != 1 and array.shape[3] > 1:
            raise TensorError(
                f"plane {plane!r} of {name}: the items of a row must lie next to each other, their "
                f"stride is {array.stride(3)}; give a view whose last axis is contiguous"
            )
    return tuple(array.stride()[:3] for array in cache.planes.values())


def _table(encoder: Encoder, device: torch.device) -> torch.Tensor | None:
    return None if encoder.table is None else encoder.table(device)


@triton.jit
def _store(
    k,
    v,
    k_strides,
    v_strides,
    slots,
    slots_stride,
    k_planes,
    v_planes,
    k_plane_strides,
    v_plane_strides,
    k_table,
    v_table,
    num_tokens,
    num_heads,
    num_slots,
    k_programs,
    K_ENCODE: tl.constexpr,
    V_ENCODE: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_BF16: tl.constexpr,
    V_BF16: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    K_TOKENS: tl.constexpr,
    K_HEADS: tl.constexpr,
    V_TOKENS: tl.constexpr,
    V_HEADS: tl.constexpr,
):
    program = tl.program_id(0)
    if program < k_programs:
        token, head, page, offset, live = _rows(
            program,
            slots,
            slots_stride,
            num_tokens,
            num_heads,
            num_slots,
            PAGE_TOKENS,
            K_TOKENS,
            K_HEADS,
        )
        K_ENCODE(
            k + token * k_strides[0] + head * k_strides[1],
            k_strides[2],
            live,
            _items(k_planes, k_plane_strides, page, head, offset),
            k_table,
            K_DIM,
            K_BF16,
        )
    else:
        token, head, page, offset, live = _rows(
            program - k_programs,
            slots,
            slots_stride,
            num_tokens,
            num_heads,
            num_slots,
            PAGE_TOKENS,
            V_TOKENS,
            V_HEADS,
        )
        V_ENCODE(
            v + token * v_strides[0] + head * v_strides[1],
            v_strides[2],
            live,
            _items(v_planes, v_plane_strides, page, head, offset),
            v_table,
            V_DIM,
            V_BF16,
        )


@triton.jit
def _rows(
    program,
    slots,
    slots_stride,
    num_tokens,
    num_heads,
    num_slots,
    PAGE_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Token, head, page and offset in it of each row of a program, int64, and which rows exist."""
    head_blocks = tl.cdiv(num_heads, HEADS)
    row = tl.arange(0, TOKENS * HEADS)
    token = (program // head_blocks * TOKENS + row % TOKENS).to(tl.int64)
    head = (program % head_blocks * HEADS + row // TOKENS).to(tl.int64)
    slot = tl.load(slots + token * slots_stride, mask=token < num_tokens, other=-1)
    live = (slot >= 0) & (slot < num_slots) & (head < num_heads)
    slot = tl.where(live, slot, 0).to(tl.uint64)
    page = (slot // PAGE_TOKENS).to(tl.int64)
    return token, head, page, (slot % PAGE_TOKENS).to(tl.int64), live


@triton.jit
def _items(planes, strides, page, head, offset):
    """Pointers to the first items of rows, per plane."""
    rows = ()
    for i in tl.static_range(len(planes)):
        where = page * strides[i][0] + head * strides[i][1] + offset * strides[i][2]
        rows = rows + (planes[i] + where,)
    return rows
