"""What a call hands to the kernels: source/arguments.cuh's structures, filled in."""

from __future__ import annotations

import ctypes

from kvq_attention.cuda import formats
from kvq_attention.errors import TensorError
from kvq_attention.verify import check_rows
from kvq_codecs import Encoded

COPY_BYTES = 16  # what is copied at once
LONGEST_STRIDE = 2**32 - 1


class Plane(ctypes.Structure):
    """A plane of a cache; strides in bytes."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("page", ctypes.c_uint32),
        ("head", ctypes.c_uint32),
    )


class Cache(ctypes.Structure):
    """K or V of a call."""

    _fields_ = (("codes", Plane), ("second", Plane), ("scale", Plane))


class Arguments(ctypes.Structure):
    """Of one call."""

    _fields_ = (
        ("k", Cache),
        ("v", Cache),
        ("q", ctypes.c_void_p),
        ("q_token", ctypes.c_int64),
        ("q_head", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("out_token", ctypes.c_int64),
        ("out_head", ctypes.c_int64),
        ("query_offsets", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("page_table", ctypes.c_void_p),
        ("table_row", ctypes.c_int64),
        ("turns", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("partial", ctypes.c_void_p),
        ("partial_lse", ctypes.c_void_p),
        ("num_pages", ctypes.c_int32),
        ("num_requests", ctypes.c_int32),
        ("num_tokens", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("page_shift", ctypes.c_int32),
        ("capacity", ctypes.c_int32),
        ("reach", ctypes.c_int32),
        ("wanted", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("score_scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


def cache(encoded: Encoded) -> Cache:
    """A cache's planes; `TensorError` where their layout is one that the kernels do not read."""
    planes = formats.get(encoded.spec.name).planes
    return Cache(*(Plane() if name is None else _plane(encoded, name) for name in planes))


def _plane(encoded: Encoded, name: str) -> Plane:
    plane = encoded.planes[name]
    where = f"plane {name!r} of a {encoded.spec.name} cache"
    check_rows(where, plane)
    item = plane.element_size()
    page, head, token = (stride * item for stride in plane.stride()[:3])
    row = plane.shape[3] * item
    if token != row and plane.shape[2] > 1:
        raise TensorError(
            f"{where}: the rows of a page must lie next to each other for cuda, a row has {row} "
            f"bytes and the next begins {token} further; triton reads such a cache"
        )
    if any(number % COPY_BYTES for number in (page, head, plane.data_ptr())):
        raise TensorError(
            f"{where}: cuda copies {COPY_BYTES} bytes at a time, so the strides of pages and heads "
            f"({page} and {head} bytes) and the address must be multiples of {COPY_BYTES}; triton "
            "reads such a cache"
        )
    if max(page, head) > LONGEST_STRIDE:
        raise TensorError(
            f"{where}: for cuda the strides of pages and heads ({page} and {head} bytes) must be "
            f"at most {LONGEST_STRIDE} bytes; triton reads such a cache"
        )
    return Plane(plane.data_ptr(), page, head)
