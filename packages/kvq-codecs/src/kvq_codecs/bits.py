"""The few array operations that the array API leaves out, for NumPy, torch and CuPy alike."""

from __future__ import annotations

import functools
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


def contiguous(array: Array) -> Array:
    """The array in row-major order, copied only if it is not."""
    if is_torch_array(array):
        return array.contiguous()
    return array_namespace(array).ascontiguousarray(array)


def scalar(xp: Any, like: Array, value: float, dtype: str = "float32") -> Array:
    """A 0-d array beside `like`.

    Never a Python scalar: torch turns a division by one into a product with its reciprocal on
    CUDA, and NumPy 1 chooses the result's dtype by the scalar's value.
    """
    return xp.full((), value, dtype=getattr(xp, dtype), device=device(like))


def product(xp: Any, a: Array, b: Array) -> Array:
    """a · b in float32 where the product may be subnormal; both arrays are float32."""
    return _cupy_product(xp)(a, b) if is_cupy_array(a) else a * b


@functools.cache
def _cupy_product(xp: Any) -> Any:
    # CuPy compiles its own product so that it flushes subnormals to zero; this instruction keeps
    # them whatever the compiler's options.
    return xp.ElementwiseKernel(
        "float32 a, float32 b",
        "float32 c",
        'asm("mul.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));',
        "kvq_product",
    )


def lookup(xp: Any, table: Any, indices: Array) -> Array:
    """`table[indices]` for a 1-d NumPy table and uint8 indices of any shape."""
    values = xp.asarray(table, device=device(indices))
    taken = xp.take(values, xp.astype(xp.reshape(indices, (-1,)), xp.int64), axis=0)
    return xp.reshape(taken, indices.shape)


def pack(xp: Any, codes: Array, bits: int) -> Array:
    """Codes [..., n] of 1, 2 or 4 bits → bytes [..., n · bits / 8], the first code lowest."""
    packed = contiguous(codes)
    while bits < 8:  # two neighbours of `bits` bits in a 16-bit word → one byte
        pairs = packed.view(xp.int16)
        packed = xp.astype((pairs | (pairs >> (8 - bits))) & (4**bits - 1), xp.uint8)
        bits *= 2
    return packed


def unpack(xp: Any, packed: Array, bits: int) -> Array:
    """Bytes [..., m] → unsigned codes [..., 8 · m / bits]: what `pack` packed."""
    codes, width = contiguous(packed), 8
    while width > bits:  # one byte → its halves as two bytes of a 16-bit word
        width //= 2
        halves = xp.astype(codes, xp.int16)
        codes = ((halves | (halves << (8 - width))) & (0x0101 * (2**width - 1))).view(xp.uint8)
    return codes


def as_bytes(array: Array) -> Array:
    """Items [..., n] → their little-endian bytes uint8 [..., n · itemsize]."""
    return contiguous(array).view(array_namespace(array).uint8)


def from_bytes(raw: Array, dtype: str) -> Array:
    """Little-endian bytes uint8 [..., n · itemsize] → items [..., n]."""
    return contiguous(raw).view(getattr(array_namespace(raw), dtype))
