"""The few array operations that the array API leaves out, for NumPy, torch and CuPy alike."""

from __future__ import annotations

import functools
import math
import sys
from contextlib import nullcontext
from typing import Any

import numpy as np
from array_api_compat import array_namespace, is_cupy_array, is_torch_array

from kvq_codecs.errors import CodecError

Array = Any  # NumPy, torch or CuPy: whatever the caller brought

HALF_NAN = 0x7E00  # the float16 bits that a NaN is stored with

if sys.byteorder != "little":
    raise ImportError("kvq-codecs views numbers as bytes and needs a little-endian machine")


def dtype_name(array: Array) -> str:
    """'float32', 'bfloat16', 'uint8', … whatever library the array comes from."""
    return str(array.dtype).removeprefix("torch.")


def plain(value: Any, what: str, error: type[CodecError]) -> Array:
    """An array whose memory is its values: no NumPy subclass, no graph, no pending sign.

    Copies only a torch tensor with a pending sign. Raises `error`, whose message starts with
    `what`, for anything but NumPy, torch and CuPy arrays, and for masked and sparse ones.
    """
    if type(value) is np.ndarray or is_cupy_array(value):
        return value
    if is_torch_array(value):
        if value.layout != array_namespace(value).strided:
            raise error(f"{what} must be dense, got layout {value.layout}; use .to_dense()")
        # Bytes have no gradient.
        return (value.detach() if value.requires_grad else value).resolve_neg()
    if isinstance(value, np.ma.MaskedArray):
        raise error(f"{what} must not be masked; use .filled(value) to say what masked ones are")
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    raise error(f"{what} must be a NumPy, torch or CuPy array, got {type(value).__name__}")


def native(array: Array) -> Array:
    """The array in this machine's byte order."""
    if isinstance(array, np.ndarray) and not array.dtype.isnative:
        return array.astype(array.dtype.newbyteorder("="))
    return array


def place(array: Array) -> Any:
    """Where the array lives, as its library's functions take it in `device=`."""
    return "cpu" if isinstance(array, np.ndarray) else array.device


def on_host(array: Array) -> bool:
    """True where the processor's caches hold the array, not a device's memory."""
    where = place(array)
    return where == "cpu" or getattr(where, "type", None) == "cpu"


def copied(array: Array) -> Array:
    """The same values in new memory, in row-major order."""
    copy = array_namespace(array).empty(array.shape, dtype=array.dtype, device=place(array))
    copy[...] = array
    return copy


def contiguous(array: Array) -> Array:
    """The array in row-major order, copied only if it is not."""
    if is_torch_array(array):
        tidy = array.contiguous()
        # torch lets an axis of length 1 have any stride, and then cannot view it as bytes.
        return tidy if tidy.stride(-1) == 1 else copied(tidy)
    return array_namespace(array).ascontiguousarray(array)


def scalar(xp: Any, like: Array, value: float, dtype: str = "float32") -> Array:
    """A 0-d array beside `like`, not to be written to: others may share it.

    Never a Python scalar: torch turns a division by one into a product with its reciprocal on
    CUDA, and NumPy 1 chooses the result's dtype by the scalar's value.
    """
    # Kept only for plain arrays on the host: memory of a device may belong to a stream or to a
    # graph under capture, and a subclass to a trace.
    if type(like) is getattr(xp, "Tensor", np.ndarray) and on_host(like):
        return _host_scalar(xp, value, dtype, math.copysign(1, value))
    return xp.full((), value, dtype=getattr(xp, dtype), device=place(like))


@functools.lru_cache(maxsize=256)
def _host_scalar(xp: Any, value: float, dtype: str, sign: float) -> Array:
    # `sign` only tells −0.0 from 0.0. A tensor made in inference mode would stay bound to it.
    with xp.inference_mode(False) if hasattr(xp, "inference_mode") else nullcontext():
        return xp.full((), value, dtype=getattr(xp, dtype), device="cpu")


def half(xp: Any, values: Array) -> Array:
    """Float32 → float16, nearest, ties to even; any NaN becomes 0x7E00.

    Not left to the conversion: CUDA's writes 0x7FFF, a processor's keeps sign and payload.
    """
    bits = xp.astype(values, xp.float16).view(xp.int16)
    nan = scalar(xp, values, HALF_NAN, "int16")
    return xp.where(xp.isnan(values), nan, bits).view(xp.float16)


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
    values = xp.asarray(table, device=place(indices))
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
    """Little-endian bytes uint8 [..., n · itemsize] → items [..., n], in memory of their own."""
    # Bytes of a file lie at any address: only a copy is sure to be aligned.
    return copied(raw).view(getattr(array_namespace(raw), dtype))
