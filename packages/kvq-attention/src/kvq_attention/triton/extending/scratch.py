"""The route through a scratch: the packed past is decoded once, into fp16 rows of a bound size.

A scratch holds what the loop over packed tiles has, to a power of two for each tile, so that a tile
costs no more than one of an fp16 cache. Where the bound holds fewer tokens than there are, KV heads
are served in turn, and then parts of the past, between which the state of each row is kept as it
is: neither changes a bit of a result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import torch

from kvq_attention.triton.compat import ptx_level
from kvq_attention.triton.extending.step import Step, attend
from kvq_attention.triton.extending.unpack import unpack
from kvq_attention.triton.formats import fp16
from kvq_attention.triton.planes import PlaneArgument
from kvq_attention.triton.side import Side
from kvq_attention.triton.tile import Tile

# What unpacking needs of the constants of a side
NEEDED = ("DIM", "COLUMNS", "SPLIT", "SCALES", "WORD", "STRIDES")
# Tokens of a part at least: smaller ones cost more launches than they are worth.
LEAST_SHARE = 256


@dataclass(frozen=True, slots=True)
class Plan:
    """How a scratch is used.

    Attributes
    ----------
    heads : KV heads at a time
    share : tokens of each request at a time
    parts : as many times
    nbytes : of the scratch and of what is kept between parts
    """

    heads: int
    share: int
    parts: int
    nbytes: int


def tile_bytes(dims: tuple[int, ...], tile: int) -> int:
    """Bytes of a tile of tokens and a head: fp16 values and a float32 unit for each packed side."""
    values, unit = torch.float16.itemsize, torch.float32.itemsize
    return sum(tile * dim * values + unit for dim in dims)


def plan(
    kept_rows: int,
    v_dim: int,
    requests: int,
    kv_heads: int,
    dims: tuple[int, ...],
    visible: int,
    tile: int,
    scratch_bytes: int,
) -> Plan | None:
    """All tokens of as many heads as there is room for, or parts of one head's; None: no room.

    Parameters
    ----------
    kept_rows : query rows of a KV head, whose states are kept between parts
    v_dim : values of such a state
    requests : that are served at a time
    dims : values a row of each packed side
    visible : tokens of a past at most
    tile : tokens that a part is a multiple of
    scratch_bytes : that `Plan.nbytes` does not exceed
    """
    nbytes = requests * tile_bytes(dims, tile)
    whole = -(-visible // tile)
    heads = min(kv_heads, scratch_bytes // (whole * nbytes))
    if heads:
        return Plan(heads, whole * tile, 1, heads * whole * nbytes)
    kept = kept_rows * (v_dim + 2) * torch.float32.itemsize
    tiles = max(0, scratch_bytes - kept) // nbytes
    share = tiles * tile
    if share < LEAST_SHARE:
        return None
    return Plan(1, share, -(-visible // share), kept + tiles * nbytes)


def extend_through(
    step: Step,
    sides: tuple[Side, Side],
    packed: tuple[bool, bool],
    num_pages: int,
    requests: int,
    planned: Plan,
    fewest: int,
) -> None:
    """Write the results of requests of `fewest` query rows a KV head and more.

    packed : whether each side is read through the scratch
    requests : that there are of these at most
    """
    rows = requests * planned.share
    tiles = step.num_tokens * step.group // step.shape.rows + requests
    made = [
        _Scratch.of(step, side, rows, planned.heads) if is_packed else None
        for side, is_packed in zip(sides, packed, strict=True)
    ]
    if planned.parts > 1:
        kept_rows = step.num_tokens * planned.heads * step.group
        kept = step.q.new_empty(kept_rows, sides[1].dim, dtype=torch.float32)
        kept_weights = step.q.new_empty(2 * kept_rows, dtype=torch.float32)
    else:  # nothing is kept
        kept = kept_weights = next(each.units for each in made if each is not None)
    for first in range(0, step.kv_heads, planned.heads):
        heads = range(first, min(first + planned.heads, step.kv_heads))
        part_of = step.heads(heads)
        sources = some_heads(sides[0], heads), some_heads(sides[1], heads)
        k, v = (
            side if scratch is None else scratch.side(side, len(heads))
            for side, scratch in zip(sources, made, strict=True)
        )
        for part in range(planned.parts):
            low = part * planned.share
            _unpack(part_of, sources, (k, v), packed, num_pages, requests, low, planned, fewest)
            attend(
                *(part_of, k, v, tiles, kept, kept_weights),
                num_pages=num_pages,
                low=low,
                share=planned.share,
                fewest=fewest,
                dense=packed,
                resumed=part > 0,
                keep=part < planned.parts - 1,
            )


@dataclass(frozen=True, slots=True, eq=False)
class _Scratch:
    """Room for one side's rows: fp16 [rows, heads, 1, dim], and units float32 [tiles, heads, 1, 1].

    As planes: a row a page. Fewer heads lie closer, in the same memory.
    """

    values: torch.Tensor
    units: torch.Tensor

    @classmethod
    def of(cls, step: Step, side: Side, rows: int, heads: int) -> _Scratch:
        tiles = rows // step.shape.tokens
        return cls(
            step.q.new_empty(rows, heads, 1, side.dim, dtype=torch.float16),
            step.q.new_empty(tiles, heads, 1, 1, dtype=torch.float32),
        )

    def side(self, packed: Side, heads: int) -> Side:
        """What it is to the kernel for so many heads: the scales are the units."""
        code, unit = (_plane(_closer(made, heads)) for made in (self.values, self.units))
        tile = _tile(packed.tile.factor, packed.tile.rotated)
        row_bytes = packed.dim * self.values.itemsize
        return Side(tile, packed.dim, row_bytes, (code, code, unit), 0, False, packed.dtype)


def _closer(made: torch.Tensor, heads: int) -> torch.Tensor:
    count, most, *row = made.shape
    if heads == most:
        return made
    shape = count, heads, *row
    return made.flatten()[: math.prod(shape)].view(shape)


def _plane(made: torch.Tensor) -> PlaneArgument:
    return PlaneArgument(made, *made.stride()[:3])


@cache
def _tile(factor: float, rotated: bool) -> Tile:
    codes = {"values": torch.float16}
    return Tile(fp16.load, split=1, codes=codes, factor=factor, rotated=rotated)


def some_heads(side: Side, heads: range) -> Side:
    """A cache's side without its other heads."""
    if len(heads) == side.planes[0].tensor.shape[1]:
        return side
    first, second, scale = (
        replace(plane, tensor=plane.tensor.narrow(1, heads.start, len(heads)))
        for plane in side.planes
    )
    return replace(side, planes=(first, second, scale))


def _unpack(
    step: Step,
    sides: tuple[Side, Side],
    dense: tuple[Side, Side],
    packed: tuple[bool, bool],
    num_pages: int,
    requests: int,
    low: int,
    planned: Plan,
    fewest: int,
) -> None:
    """Decode a part of some heads' rows, of each side that is packed."""
    k, v = sides
    tiles = -(-min(planned.share, step.visible) // step.shape.tokens)
    constants = k.constants("K") | v.constants("V")
    needed = {f"{side}_{name}": constants[f"{side}_{name}"] for side in "KV" for name in NEEDED}
    unpack[(tiles, step.kv_heads, sum(packed) * requests)](
        k.tensors,
        dense[0].tensors[0],
        dense[0].tensors[2],
        v.tensors,
        dense[1].tensors[0],
        dense[1].tensors[2],
        step.query_offsets,
        step.seq_lens,
        step.table,
        k.pages,
        v.pages,
        step.table.stride(0),
        num_pages,
        step.num_requests,
        step.reach,
        low,
        planned.share,
        step.window or 0,
        K_PACKED=packed[0],
        V_PACKED=packed[1],
        LOAD_K=k.tile.load,
        LOAD_V=v.tile.load,
        **needed,
        **step.common,
        KV_HEADS=step.kv_heads,
        PAGE=step.page_tokens,
        FEWEST=fewest,
        ASM=ptx_level(step.q.device),
    )
