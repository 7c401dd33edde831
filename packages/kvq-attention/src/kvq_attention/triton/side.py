"""One side of a decode, K or V: a cache's planes and what the kernel must know of its format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import triton.language as tl

from kvq_attention.triton import formats
from kvq_attention.triton.compat import INTERPRETED
from kvq_attention.triton.planes import PlaneArgument, fits
from kvq_attention.triton.tile import Tile
from kvq_attention.triton.tiles import Load, power_of_two
from kvq_codecs import Encoded

# Integers that hold the 2 or 4 fp16 scales of a row
WORDS = {2: torch.int32, 4: torch.int64}
# Columns that a tile needs to be multiplied in the layout in which it is unpacked
NARROW = 32


@dataclass(frozen=True, slots=True)
class Side:
    """K or V of a call.

    Attributes
    ----------
    tile : the format's loader
    dim : values a row
    row_bytes : bytes of a row
    planes : first and second code plane and the scales; a plane that is missing is the first again
    scales : scales a row that multiply scores or probabilities; 0 = none
    word : the scales of a row are read as one integer
    dtype : what products with this side's tiles are made in
    """

    tile: Tile
    dim: int
    row_bytes: int
    planes: tuple[PlaneArgument, PlaneArgument, PlaneArgument]
    scales: int
    word: bool
    dtype: Any

    @classmethod
    def of(cls, cache: Encoded, query_dtype: torch.dtype) -> Side:
        """The side that a cache is, for queries of a dtype; made once where its planes stay."""
        where = tuple((plane.data_ptr(), plane.stride()) for plane in cache.planes.values())
        made = _SIDES.get(cache)
        if made is None:
            made = _SIDES[cache] = {}
        known = made.get(query_dtype)
        if known is not None and known[0] == where:
            return known[1]
        side = cls._made(cache, query_dtype)
        if all(type(tensor) is torch.Tensor for tensor in side.tensors):  # what a trace sees is not
            made[query_dtype] = where, side
        return side

    @classmethod
    def _made(cls, cache: Encoded, query_dtype: torch.dtype) -> Side:
        tile: Tile = formats.get(cache.spec.name).TILE
        codes = [PlaneArgument.of(cache, name, dtype) for name, dtype in tile.codes.items()]
        scales, word, scale = 0, False, codes[0]
        if tile.scale is not None:
            plane = cache.planes[tile.scale]
            scales = plane.shape[3]
            dtype = WORDS.get(scales, plane.dtype)
            word = dtype != plane.dtype and fits(plane, dtype)
            scale = PlaneArgument.of(cache, tile.scale, dtype if word else plane.dtype)
        product = product_dtype(next(iter(tile.codes.values())), query_dtype)
        planes = (codes[0], codes[-1], scale)
        return cls(tile, cache.dim, cache.spec.row_bytes(cache.dim), planes, scales, word, product)

    @property
    def columns(self) -> int:
        """Columns of a tile, a power of two that products accept."""
        columns = power_of_two(self.dim // self.tile.split)
        return max(16, columns)

    @property
    def load(self) -> Load:
        """What the picker must know."""
        values = self.columns * self.tile.split
        padded = self.row_bytes * values // self.dim
        product_bytes = self.dtype.primitive_bitwidth // 8
        return Load(values, self.tile.tokens, padded, product_bytes, self.columns < NARROW)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The planes."""
        return tuple(plane.tensor for plane in self.planes)

    @property
    def pages(self) -> tuple[int, ...]:
        """The planes' page strides."""
        return tuple(plane.page for plane in self.planes)

    def constants(self, side: str) -> dict[str, Any]:
        """The kernel's compile-time arguments for this side, "K" or "V"."""
        return {
            f"LOAD_{side}": self.tile.load,
            f"{side}_DIM": self.dim,
            f"{side}_COLUMNS": self.columns,
            f"{side}_SPLIT": self.tile.split,
            f"{side}_DTYPE": self.dtype,
            f"{side}_SCALES": self.scales,
            f"{side}_WORD": self.word,
            f"{side}_ROTATED": self.tile.rotated,
            f"{side}_STRIDES": tuple((plane.head, plane.token) for plane in self.planes),
        }


# Each call of an op needs the side of a cache: where its planes were when it was made, and it.
_SIDES: WeakKeyDictionary[Encoded, dict[torch.dtype, tuple[object, Side]]] = WeakKeyDictionary()


def product_dtype(stored: torch.dtype, query: torch.dtype) -> Any:
    """What tiles of a stored dtype are multiplied in, for queries of a dtype.

    Codes are integers or few-bit floats that fp16 holds exactly. bf16 rows meet bf16 queries as
    they are; other queries have more bits than bf16, and the interpreter computes bf16 wrongly.
    """
    if stored == torch.float32:
        return tl.float32
    if stored != torch.bfloat16:
        return tl.float16
    return tl.bfloat16 if query == torch.bfloat16 and not INTERPRETED else tl.float32
