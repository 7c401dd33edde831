"""The byte layout of a codec, declared once.

Everything that multiplies by a format's size asks this module: nobody else does.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import Any

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
        _check_name("a plane", self.name)
        if not (_is_count(self.items) and (self.span is None or _is_count(self.span))):
            raise ValueError(
                f"plane {self.name!r}: items must be a positive integer, and span one or None; "
                f"got {self.items!r} and {self.span!r}"
            )

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
    divisor : head_dim must be a multiple of this many values
    """

    name: str
    planes: tuple[Plane, ...]
    source: str
    interchange: tuple[str | int, ...] | None = None
    divisor: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_name("a spec", self.name)
        if type(self.planes) is not tuple or not all(isinstance(p, Plane) for p in self.planes):
            raise ValueError(f"{self.name}: planes must be a tuple of Plane, got {self.planes!r}")
        names = [p.name for p in self.planes]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"{self.name}: needs planes of different names, got {names}")
        if self.interchange is not None:
            fields = [f for f in self.interchange if isinstance(f, str)]
            if sorted(fields) != sorted(names):
                raise ValueError(f"{self.name}: interchange must hold {names}, got {fields}")
            dead = [f for f in self.interchange if not isinstance(f, str)]
            if not all(map(_is_count, dead)):
                raise ValueError(f"{self.name}: dead bytes must be positive integers, got {dead}")
            if any(p.span is None for p in self.planes):
                raise ValueError(f"{self.name}: interchange blocks cannot hold a plane of the row")
        spans = (p.span for p in self.planes if p.span is not None)
        object.__setattr__(self, "divisor", math.lcm(*spans))

    def check(self, dim: int) -> int:
        """`dim` as an int; `RowError` when rows of so many values cannot be stored."""
        given = dim
        if type(dim) is not int:  # NumPy's integers are none, True is a kind of one
            dim = operator.index(dim) if _is_integer(dim) else 0
        if dim < 1:
            raise RowError(f"{self.name}: head_dim must be a positive integer, got {given!r}")
        if dim % self.divisor:
            raise RowError(
                f"{self.name}: head_dim {dim} is not a multiple of {self.divisor}; "
                f"choose a codec whose block divides {dim} (kvq_codecs.names() lists them)"
            )
        return dim

    def row_bytes(self, dim: int) -> int:
        """Bytes of one stored row (pool layout)."""
        dim = self.check(dim)
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
        dim = self.check(dim)
        return sum(size for _, size in self.fields(dim)) * self.row_blocks(dim)

    def plane(self, name: str) -> Plane:
        """The plane of that name; KeyError if there is none."""
        for p in self.planes:
            if p.name == name:
                return p
        raise KeyError(f"{self.name} has no plane {name!r}; it has {[p.name for p in self.planes]}")


def _check_name(what: str, name: Any) -> None:
    if not isinstance(name, str) or not name:
        raise ValueError(f"{what} needs a name that is not empty, got {name!r}")


def _is_integer(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1
