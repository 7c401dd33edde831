"""A codec: a spec and its oracle. All that is not the format itself lives here, once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from kvq_codecs.bits import as_bytes, dtype_name, from_bytes, native, on_host, place, plain
from kvq_codecs.encoded import Encoded
from kvq_codecs.errors import CodecError, PlaneError, RowError, check_kind
from kvq_codecs.spec import Spec

Array = Any
FLOATS = ("float16", "bfloat16", "float32", "float64")

# Values worked on at once: temporaries stay in a core's cache, or small beside a device's memory.
HOST_CHUNK_VALUES = 1 << 17
DEVICE_CHUNK_VALUES = 1 << 24


@dataclass(frozen=True, slots=True)
class Codec:
    """Rows to bytes and back.

    Attributes
    ----------
    spec : the layout
    encode_rows : (xp, float32 [n, dim]) → planes {name: [n, items]}
    decode_rows : (xp, planes {name: [n, items]}, dim) → float32 [n, dim]

    Planes and rows that the two functions return must have exactly the shapes and dtypes that
    the spec declares: `PlaneError` otherwise.
    """

    spec: Spec
    encode_rows: Callable[[Any, Array], Mapping[str, Array]]
    decode_rows: Callable[[Any, Mapping[str, Array], int], Array]

    def __post_init__(self) -> None:
        check_kind(self.spec, Spec, "a codec's spec", CodecError)
        check_kind(self.encode_rows, Callable, f"{self.name}: encode_rows", CodecError)
        check_kind(self.decode_rows, Callable, f"{self.name}: decode_rows", CodecError)

    @property
    def name(self) -> str:
        """Registry name."""
        return self.spec.name

    def encode(self, rows: Array) -> Encoded:
        """Encode rows [..., head_dim] of any float dtype; float64 rounds to float32 first.

        NumPy, torch and CuPy arrays of any strides; the planes stay in the library and on the
        device of the rows. A NaN stays one; the sign and payload with which fp32 and bf16 store
        it are those of the library's conversion to float32. Raises `RowError`.
        """
        rows = native(plain(rows, f"{self.name}: rows", RowError))
        if len(rows.shape) == 0:
            raise RowError(f"{self.name}: rows must have shape [..., head_dim], got a 0-d array")
        if dtype_name(rows) not in FLOATS:
            raise RowError(
                f"{self.name}: rows must be one of {', '.join(FLOATS)}, got {dtype_name(rows)}"
            )
        dim = int(rows.shape[-1])
        self.spec.check(dim)
        xp, lead = array_namespace(rows), tuple(rows.shape[:-1])
        flat = xp.reshape(rows, (math.prod(lead), dim))
        count, where = flat.shape[0], place(flat)
        planes = {
            p.name: xp.empty((count, p.row_items(dim)), dtype=getattr(xp, p.dtype), device=where)
            for p in self.spec.planes
        }
        with np.errstate(all="ignore"):
            for start, stop in _chunks(flat, dim):
                part = xp.astype(_rows(flat, start, stop), xp.float32, copy=False)
                made = self.encode_rows(xp, part)
                check_kind(made, Mapping, f"{self.name}: result of encode_rows", PlaneError)
                if made.keys() != planes.keys():
                    raise PlaneError(
                        f"{self.name}: encode_rows must return planes {list(planes)}, "
                        f"got {list(made)}"
                    )
                for name, items in made.items():
                    self._put(_rows(planes[name], start, stop), items, f"plane {name!r}")
        return Encoded(
            self.spec, dim, {n: xp.reshape(a, (*lead, a.shape[-1])) for n, a in planes.items()}
        )

    def decode(self, encoded: Encoded) -> Array:
        """Decode to float32 [..., head_dim]. Raises `PlaneError` for rows of another codec."""
        self._check_own(encoded, "decode")
        xp, dim = array_namespace(*encoded.planes.values()), encoded.dim
        count = math.prod(encoded.lead)
        planes = {n: xp.reshape(a, (count, a.shape[-1])) for n, a in encoded.planes.items()}
        first = planes[self.spec.planes[0].name]
        rows = xp.empty((count, dim), dtype=xp.float32, device=place(first))
        with np.errstate(all="ignore"):
            for start, stop in _chunks(first, dim):
                part = {n: _rows(a, start, stop) for n, a in planes.items()}
                made = self.decode_rows(xp, part, dim)
                self._put(_rows(rows, start, stop), made, "decoded rows")
        return xp.reshape(rows, encoded.shape)

    def to_blocks(self, encoded: Encoded) -> Array:
        """Bytes as files hold them: uint8 [..., spec.block_bytes(dim)].

        The fields of `Spec.interchange` block after block, or, without one, the planes in order
        over the whole row.
        """
        self._check_own(encoded, "pack")
        xp = array_namespace(*encoded.planes.values())
        where = place(encoded.planes[self.spec.planes[0].name])
        count = self.spec.row_blocks(encoded.dim)
        fields = []
        for name, size in self.spec.fields(encoded.dim):
            shape = (*encoded.lead, count, size)
            if name is None:
                fields.append(xp.zeros(shape, dtype=xp.uint8, device=where))
            else:
                fields.append(xp.reshape(as_bytes(encoded.planes[name]), shape))
        total = self.spec.block_bytes(encoded.dim)
        return xp.reshape(xp.concat(fields, axis=-1), (*encoded.lead, total))

    def from_blocks(self, blocks: Array, head_dim: int) -> Encoded:
        """The rows in bytes uint8 [..., spec.block_bytes(head_dim)] that `to_blocks` describes.

        The bytes may lie at any address; the planes never share memory with them.
        """
        head_dim = self.spec.check(head_dim)
        wanted = self.spec.block_bytes(head_dim)
        blocks = plain(blocks, f"{self.name}: blocks", PlaneError)
        if dtype_name(blocks) != "uint8":
            raise PlaneError(f"{self.name}: blocks must be a uint8 array, got {dtype_name(blocks)}")
        if len(blocks.shape) == 0 or blocks.shape[-1] != wanted:
            raise PlaneError(
                f"{self.name}: blocks at head_dim {head_dim} must have shape [..., {wanted}], "
                f"got {list(blocks.shape)}"
            )
        xp, lead = array_namespace(blocks), tuple(blocks.shape[:-1])
        count = self.spec.row_blocks(head_dim)
        grouped = xp.reshape(blocks, (*lead, count, wanted // count))
        planes, start = {}, 0
        for name, size in self.spec.fields(head_dim):
            if name is not None:
                plane = self.spec.plane(name)
                items = from_bytes(grouped[..., start : start + size], plane.dtype)
                planes[name] = xp.reshape(items, (*lead, plane.row_items(head_dim)))
            start += size
        return Encoded(self.spec, head_dim, planes)

    def _check_own(self, encoded: Encoded, verb: str) -> None:
        check_kind(encoded, Encoded, f"{self.name}: what to {verb}", PlaneError)
        if encoded.spec != self.spec:
            raise PlaneError(f"{self.name} cannot {verb} rows of {encoded.spec.name}")

    def _put(self, into: Array, items: Array, what: str) -> None:
        """Store what one of the codec's functions made."""
        check_kind(items, type(into), f"{self.name}: {what}", PlaneError)
        if items.dtype != into.dtype or items.shape != into.shape:
            raise PlaneError(
                f"{self.name}: {what} must be {dtype_name(into)} {list(into.shape)}, "
                f"got {dtype_name(items)} {list(items.shape)}"
            )
        into[...] = items


def _chunks(rows: Array, dim: int) -> Iterator[tuple[int, int]]:
    """Row ranges [start, stop) of a bounded number of values."""
    step = max(1, (HOST_CHUNK_VALUES if on_host(rows) else DEVICE_CHUNK_VALUES) // dim)
    for start in range(0, rows.shape[0], step):
        yield start, min(start + step, rows.shape[0])


def _rows(array: Array, start: int, stop: int) -> Array:
    """Rows [start, stop); the array itself if those are all, for a slice costs microseconds."""
    return array if stop - start == array.shape[0] else array[start:stop, :]
