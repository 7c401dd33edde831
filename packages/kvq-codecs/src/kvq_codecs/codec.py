"""A codec: a spec and its oracle. All that is not the format itself lives here, once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device

from kvq_codecs.bits import as_bytes, detached, dtype_name, from_bytes, is_array, on_host
from kvq_codecs.encoded import Encoded
from kvq_codecs.errors import PlaneError, RowError
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
    """

    spec: Spec
    encode_rows: Callable[[Any, Array], Mapping[str, Array]]
    decode_rows: Callable[[Any, Mapping[str, Array], int], Array]

    @property
    def name(self) -> str:
        """Registry name."""
        return self.spec.name

    def encode(self, rows: Array) -> Encoded:
        """Encode rows [..., head_dim] of any float dtype; float64 rounds to float32 first.

        NumPy, torch and CuPy arrays of any strides; the planes stay in the library and on the
        device of the rows. Raises `RowError`.
        """
        if not is_array(rows):
            raise RowError(
                f"{self.name}: rows must be a NumPy, torch or CuPy array, got {type(rows).__name__}"
            )
        if len(rows.shape) == 0:
            raise RowError(f"{self.name}: rows must have shape [..., head_dim], got a 0-d array")
        if dtype_name(rows) not in FLOATS:
            raise RowError(
                f"{self.name}: rows must be one of {', '.join(FLOATS)}, got {dtype_name(rows)}"
            )
        dim = int(rows.shape[-1])
        self.spec.check(dim)
        xp, lead = array_namespace(rows), tuple(rows.shape[:-1])
        flat = xp.reshape(detached(rows), (math.prod(lead), dim))
        planes = {
            p.name: xp.empty(
                (flat.shape[0], p.row_items(dim)), dtype=getattr(xp, p.dtype), device=device(flat)
            )
            for p in self.spec.planes
        }
        with np.errstate(all="ignore"):
            for start, stop in _chunks(flat, dim):
                part = xp.astype(flat[start:stop, :], xp.float32, copy=False)
                for name, items in self.encode_rows(xp, part).items():
                    planes[name][start:stop, :] = items
        return Encoded(
            self.spec, dim, {n: xp.reshape(a, (*lead, a.shape[-1])) for n, a in planes.items()}
        )

    def decode(self, encoded: Encoded) -> Array:
        """Decode to float32 [..., head_dim]. Raises `PlaneError` for rows of another codec."""
        if encoded.spec != self.spec:
            raise PlaneError(f"{self.name} cannot decode rows of {encoded.spec.name}")
        xp, dim = array_namespace(*encoded.planes.values()), encoded.dim
        count = math.prod(encoded.lead)
        planes = {
            n: xp.reshape(detached(a), (count, a.shape[-1])) for n, a in encoded.planes.items()
        }
        first = planes[self.spec.planes[0].name]
        rows = xp.empty((count, dim), dtype=xp.float32, device=device(first))
        with np.errstate(all="ignore"):
            for start, stop in _chunks(first, dim):
                part = {n: a[start:stop, :] for n, a in planes.items()}
                rows[start:stop, :] = self.decode_rows(xp, part, dim)
        return xp.reshape(rows, encoded.shape)

    def to_blocks(self, encoded: Encoded) -> Array:
        """Bytes as files hold them: uint8 [..., spec.block_bytes(dim)].

        The fields of `Spec.interchange` block after block, or, without one, the planes in order
        over the whole row.
        """
        if encoded.spec != self.spec:
            raise PlaneError(f"{self.name} cannot pack rows of {encoded.spec.name}")
        xp = array_namespace(*encoded.planes.values())
        place = device(encoded.planes[self.spec.planes[0].name])
        count = self.spec.row_blocks(encoded.dim)
        fields = []
        for name, size in self.spec.fields(encoded.dim):
            shape = (*encoded.lead, count, size)
            if name is None:
                fields.append(xp.zeros(shape, dtype=xp.uint8, device=place))
            else:
                fields.append(xp.reshape(as_bytes(detached(encoded.planes[name])), shape))
        total = self.spec.block_bytes(encoded.dim)
        return xp.reshape(xp.concat(fields, axis=-1), (*encoded.lead, total))

    def from_blocks(self, blocks: Array, head_dim: int) -> Encoded:
        """The rows in bytes uint8 [..., spec.block_bytes(head_dim)] that `to_blocks` describes."""
        wanted = self.spec.block_bytes(head_dim)
        if not is_array(blocks) or dtype_name(blocks) != "uint8":
            got = dtype_name(blocks) if is_array(blocks) else type(blocks).__name__
            raise PlaneError(f"{self.name}: blocks must be a uint8 array, got {got}")
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


def _chunks(rows: Array, dim: int) -> Iterator[tuple[int, int]]:
    """Row ranges [start, stop) of a bounded number of values."""
    step = max(1, (HOST_CHUNK_VALUES if on_host(rows) else DEVICE_CHUNK_VALUES) // dim)
    for start in range(0, rows.shape[0], step):
        yield start, min(start + step, rows.shape[0])
