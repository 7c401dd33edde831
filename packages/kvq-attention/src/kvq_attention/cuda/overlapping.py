"""Launches beside the kernel before: CUDA's programmatic dependent launch, which CuPy lacks."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

from kvq_attention.errors import DeviceError

# CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION of the driver's interface
SERIALIZATION = 6


class Attribute(ctypes.Structure):
    """CUlaunchAttribute; its value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((f"{of}_{axis}", ctypes.c_uint) for of in ("grid", "block") for axis in "xyz"),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    )


def launch(
    kernel: int,
    grid: tuple[int, ...],
    threads: int,
    shared_bytes: int,
    stream: int,
    args: Sequence[ctypes.Structure],
) -> None:
    """Launch a kernel that may start while the one before it in the stream runs.

    kernel : the driver's handle, of the current context. Raises `DeviceError` with the driver's
    reason.
    """
    attribute = Attribute(id=SERIALIZATION)
    attribute.value[0] = 1
    x, y, z = (*grid, 1, 1)[:3]
    config = Config(x, y, z, threads, 1, 1, shared_bytes, stream, ctypes.pointer(attribute), 1)
    parameters = (ctypes.c_void_p * len(args))(*map(ctypes.addressof, args))
    driver = _driver()
    code = driver.cuLaunchKernelEx(
        ctypes.byref(config), ctypes.c_void_p(kernel), parameters, ctypes.c_void_p(None)
    )
    if code:
        said = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(said))
        reason = said.value.decode() if said.value else "unknown"
        raise DeviceError(f"the CUDA driver did not launch a kernel: {reason} ({code})")


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
