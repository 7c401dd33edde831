"""The byte layout of a codec, declared once.

Everything that multiplies by a format's size asks this module: nobody else does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvq_codecs.errors import RowError

ITEM_BYTES = {"uint8": 1, "uint16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Plane:
    """One buffer's worth of a row.

    Attributes
    ----------
    name : the key in `Encoded.planes`
    dtype : storage type of one item: uint8, uint16, float16 or float32
    items : items per span
    span : values along head_dim that `items` items cover; None = the whole row
    """

    name: str
    dtype: str
    items: int = 1
    span: int | None = 1

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            allowed = ", ".join(ITEM_BYTES)
            raise ValueError(f"plane {self.name!r}: dtype {self.dtype!r} is not one of {allowed}")
        if self.items < 1 or (self.span is not None and self.span < 1):
            raise ValueError(f"plane {self.name!r}: items and span must be at least 1")

    def row_items(self, dim: int) -> int:
        """Items of one row of `dim` values."""
        return self.items if self.span is None else self.items * (dim // self.span)

    def row_bytes(self, dim: int) -> int:
        """Bytes of one row of `dim` values."""
        return self.row_items(dim) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Spec:
    """A codec's name and planes.

    Attributes
    ----------
    name : registry name
    planes : in the order in which interchange bytes hold them, unless `interchange` says otherwise
    source : where the bytes are defined, in words
    interchange : layout of one block of `divisor` values as files of other programs hold it:
        plane names in order, an int for that many dead bytes (written 0, ignored on reading).
        None: the whole row, planes in order.
    """

    name: str
    planes: tuple[Plane, ...]
    source: str
    interchange: tuple[str | int, ...] | None = None

    def __post_init__(self) -> None:
        names = [p.name for p in self.planes]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"{self.name}: needs planes of different names, got {names}")
        if self.interchange is not None:
            fields = [f for f in self.interchange if isinstance(f, str)]
            if sorted(fields) != sorted(names):
                raise ValueError(f"{self.name}: interchange must hold {names}, got {fields}")
            if any(p.span is None for p in self.planes):
                raise ValueError(f"{self.name}: interchange blocks cannot hold a plane of the row")

    @property
    def divisor(self) -> int:
        """head_dim must be a multiple of this many values."""
        return math.lcm(*(p.span for p in self.planes if p.span is not None))

    def check(self, dim: int) -> None:
        """Raise `RowError` when rows of `dim` values cannot be stored."""
        if type(dim) is not int or dim < 1:
            raise RowError(f"{self.name}: head_dim must be a positive integer, got {dim!r}")
        if dim % self.divisor:
            raise RowError(
                f"{self.name}: head_dim {dim} is not a multiple of {self.divisor}; "
                f"choose a codec whose block divides {dim} (kvq_codecs.names() lists them)"
            )

    def row_bytes(self, dim: int) -> int:
        """Bytes of one stored row (pool layout)."""
        self.check(dim)
        return sum(p.row_bytes(dim) for p in self.planes)

    def row_blocks(self, dim: int) -> int:
        """Interchange blocks of one row; 1 if the row is laid out as a whole."""
        return 1 if self.interchange is None else dim // self.divisor

    def fields(self, dim: int) -> tuple[tuple[str | None, int], ...]:
        """(plane name, bytes) of one interchange block, in order; None for dead bytes."""
        span = dim if self.interchange is None else self.divisor
        order = self.interchange or tuple(p.name for p in self.planes)
        return tuple(
            (None, f) if isinstance(f, int) else (f, self.plane(f).row_bytes(span)) for f in order
        )

    def block_bytes(self, dim: int) -> int:
        """Bytes of one row in the interchange layout (`Codec.to_blocks`)."""
        self.check(dim)
        return sum(size for _, size in self.fields(dim)) * self.row_blocks(dim)

    def plane(self, name: str) -> Plane:
        """The plane of that name; KeyError if there is none."""
        for p in self.planes:
            if p.name == name:
                return p
        raise KeyError(f"{self.name} has no plane {name!r}; it has {[p.name for p in self.planes]}")
