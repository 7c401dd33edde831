"""The few array operations that the array API leaves out, for NumPy, torch and CuPy alike."""

from __future__ import annotations

import sys
from typing import Any

from array_api_compat import (
    array_namespace,
    device,
    is_cupy_array,
    is_numpy_array,
    is_torch_array,
)

Array = Any  # NumPy, torch or CuPy: whatever the caller brought

if sys.byteorder != "little":
    raise ImportError("kvq-codecs views numbers as bytes and needs a little-endian machine")


def dtype_name(array: Array) -> str:
    """'float32', 'bfloat16', 'uint8', … whatever library the array comes from."""
    return str(array.dtype).removeprefix("torch.")


def is_array(value: object) -> bool:
    """True for the arrays that codecs take: NumPy, torch, CuPy."""
    return is_numpy_array(value) or is_torch_array(value) or is_cupy_array(value)


def on_host(array: Array) -> bool:
    """True where the processor's caches hold the array, not a device's memory."""
    where = device(array)
    return where == "cpu" or getattr(where, "type", None) == "cpu"


def detached(array: Array) -> Array:
    """The array outside any autograd graph: bytes have no gradient."""
    return array.detach() if hasattr(array, "detach") else array


def constant(xp: Any, like: Array, values: Any, dtype: str = "float32") -> Array:
    """Values of that dtype beside `like`.

    A 0-d array on the device, never a Python scalar: torch turns a division by a scalar into a
    multiplication by its reciprocal on CUDA.
    """
    return xp.asarray(values, dtype=getattr(xp, dtype), device=device(like))


def lookup(xp: Any, table: Any, indices: Array) -> Array:
    """`table[indices]` for a NumPy table [size, ...] and uint8 indices."""
    values = constant(xp, indices, table, dtype_name(table))
    flat = xp.astype(xp.reshape(indices, (-1,)), xp.int32)
    taken = xp.take(values, flat, axis=0)
    return xp.reshape(taken, (*indices.shape, *table.shape[1:]))


def pack(xp: Any, codes: Array, bits: int) -> Array:
    """Codes [..., n] of 1, 2 or 4 bits → bytes [..., n · bits / 8], the first code lowest."""
    per_byte = 8 // bits
    packed = codes[..., 0::per_byte]
    for i in range(1, per_byte):
        packed = packed | (codes[..., i::per_byte] << (i * bits))
    return packed


def unpack(xp: Any, packed: Array, bits: int) -> Array:
    """Bytes [..., m] → unsigned codes [..., 8 · m / bits]: what `pack` packed."""
    per_byte = 8 // bits
    codes = [(packed >> (i * bits)) & (2**bits - 1) for i in range(per_byte)]
    return xp.reshape(xp.stack(codes, axis=-1), (*packed.shape[:-1], -1))


def as_bytes(array: Array) -> Array:
    """Items [..., n] → their little-endian bytes uint8 [..., n · itemsize]."""
    return _contiguous(array).view(array_namespace(array).uint8)


def from_bytes(raw: Array, dtype: str) -> Array:
    """Little-endian bytes uint8 [..., n · itemsize] → items [..., n]."""
    return _contiguous(raw).view(getattr(array_namespace(raw), dtype))


def _contiguous(array: Array) -> Array:
    if is_torch_array(array):
        return array.contiguous()
    return array_namespace(array).ascontiguousarray(array)
