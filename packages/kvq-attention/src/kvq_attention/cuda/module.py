"""Kernels of a CUDA C++ text, loaded and launched through CuPy.

CuPy is imported here alone, and only when a kernel is wanted; it keeps compiled kernels on disk.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from kvq_attention.cuda import overlapping
from kvq_attention.cuda.compile import INSTALL, OPTIONS
from kvq_attention.errors import DeviceError, UnsupportedError

OLDEST = 80  # compute capability 8.0: asynchronous copies, products of bf16
BESIDE = 90  # from which on a kernel may start beside the one before it
TRIAL = 'extern "C" __global__ void trial() {}'
MOST_TOLD = 300  # characters of an error that CuPy or a compiler makes

Argument = torch.Tensor | ctypes.Structure | np.generic | int | float | None


def unavailable(device: str) -> str | None:
    """Why the kernels cannot run on a torch device type; None if they can.

    Raises `UnsupportedError` where it is first asked within the capture of a CUDA graph.
    """
    if device == "cuda":
        return _unavailable()
    return f"its kernels run on cuda devices, not {device}" + (
        "" if torch.cuda.is_available() else ", and torch finds no GPU here"
    )


def function(source: str, name: str, device: torch.device) -> Function:
    """A kernel of a text, compiled and loaded for a device when it is first asked for.

    Parameters
    ----------
    source : see `kvq_attention.cuda.compile.source`
    name : of an `extern "C"` kernel
    device : a tensor's, so that it has an index

    Raises `UnsupportedError` where such kernels cannot run, or cannot be compiled or loaded: what
    CuPy raised is its cause, of which `CompileException` holds the compiler's log. So does a first
    call for a device that falls into the capture of a CUDA graph; the capture goes on.
    """
    reason = unavailable(device.type)
    if reason is not None:
        raise UnsupportedError(f"cuda cannot run on {device}: {reason}")
    return _function(source, name, device.index)


class Function:
    """A kernel on one device.

    Attributes
    ----------
    device_index : of the CUDA device
    registers : of a thread
    """

    def __init__(self, kernel: Any, device_index: int) -> None:
        """`kernel` is CuPy's, of the device."""
        self.device_index = device_index
        self.registers: int = kernel.num_regs  # asking loads it, which a capture would forbid
        self._kernel = kernel
        self._shared_bytes = 0

    def launch_beside(
        self,
        grid: tuple[int, ...],
        threads: int,
        shared_bytes: int,
        args: Sequence[ctypes.Structure],
    ) -> None:
        """`launch` for a kernel that waits by itself for what was launched before it.

        Where GPUs can, from compute capability 9.0 on, it starts beside that.
        """
        if _level(self.device_index) < BESIDE or 0 in grid:
            self.launch(grid, threads, shared_bytes, args)
            return
        pointer = torch.cuda.current_stream(self.device_index).cuda_stream
        with _device(self.device_index):
            self._allow(shared_bytes)
            kernel = self._kernel.kernel.ptr
            overlapping.launch(kernel, grid, threads, shared_bytes, pointer, args)

    def launch(
        self, grid: tuple[int, ...], threads: int, shared_bytes: int, args: Sequence[Argument]
    ) -> None:
        """Launch on torch's current stream of the device; of an empty grid nothing.

        Parameters
        ----------
        grid : blocks along x, y and z
        threads : of a block
        shared_bytes : dynamic shared memory of a block
        args : tensors and None (a null pointer) for pointers, int for integers of 32 or 64 bits,
            float for float, NumPy scalars for what is of another size, ctypes structures

        Raises `DeviceError` for a tensor that lies elsewhere.
        """
        if 0 in grid:
            return
        values = tuple(map(self._value, args))
        pointer = torch.cuda.current_stream(self.device_index).cuda_stream
        with _device(self.device_index), _stream(pointer):
            self._allow(shared_bytes)
            self._kernel(grid, (threads,), values, shared_mem=shared_bytes)

    def resident_blocks(self, threads: int, shared_bytes: int) -> int:
        """Blocks that a multiprocessor holds at once: what a persistent grid is sized by."""
        from cupy.cuda import driver

        with _device(self.device_index):
            self._allow(shared_bytes)
            found: int = driver.occupancyMaxActiveBlocksPerMultiprocessor(
                self._kernel.kernel.ptr, threads, shared_bytes
            )
        return found

    def _value(self, arg: Argument) -> np.ndarray[Any, Any] | np.generic | int:
        """An argument as CuPy passes it: an int as 64 bits, whose low half comes first."""
        if isinstance(arg, ctypes.Structure):
            return np.frombuffer(bytes(arg), f"V{ctypes.sizeof(arg)}")
        if isinstance(arg, torch.Tensor):
            if arg.device.type != "cuda" or arg.device.index != self.device_index:
                raise DeviceError(
                    f"a tensor on {arg.device} was given to a kernel on cuda:{self.device_index}; "
                    "all tensors of a call must lie on one device"
                )
            return arg.data_ptr()
        if isinstance(arg, float) and not isinstance(arg, np.generic):
            return np.float32(arg)
        return 0 if arg is None else arg

    def _allow(self, shared_bytes: int) -> None:
        """More than 48 KiB of shared memory must be allowed, once."""
        if shared_bytes > self._shared_bytes:
            self._kernel.max_dynamic_shared_size_bytes = shared_bytes
            self._shared_bytes = shared_bytes


@cache
def _unavailable() -> str | None:
    """Why kernels cannot run on this process' GPUs."""
    if torch.version.hip is not None:
        return "its kernels are for NVIDIA's GPUs, and this torch is built for ROCm"
    if not torch.cuda.is_available():
        return "torch finds no NVIDIA GPU"
    levels = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
    for index, (major, minor) in enumerate(levels):
        if 10 * major + minor < OLDEST:
            return (
                f"its kernels need compute capability 8.0 or newer, cuda:{index} has "
                f"{major}.{minor}; CUDA_VISIBLE_DEVICES can leave it out"
            )
    _refuse_capture("whether its kernels run cannot be found out")
    try:
        if find_spec("cupy") is None:
            return f"CuPy is not installed; {INSTALL}"
        from cupy.cuda import nvrtc, runtime

        nvrtc.getVersion()
        if runtime.is_hip:
            return "CuPy is built for ROCm"
        _trial()
    except Exception as error:  # whatever is broken in it or beside it, it is of no use
        return f"CuPy cannot be used ({_told(error)}); {INSTALL}"
    return None


def _trial() -> None:
    """Make a kernel that does nothing: what keeps others from being made is raised by it, too.

    CuPy may be imported and still be of no use: without a driver that is new enough, the compiler's
    own files or a place to keep kernels in.
    """
    _made(TRIAL, "trial", torch.cuda.current_device())


def _told(error: Exception) -> str:
    """An error in one line that is not too long."""
    line = " ".join(f"{type(error).__name__}: {error}".split())
    return line if len(line) <= MOST_TOLD else f"{line[:MOST_TOLD]} …"


@cache
def _level(device_index: int) -> int:
    """Compute capability: 90 is 9.0."""
    major, minor = torch.cuda.get_device_capability(device_index)
    return 10 * major + minor


@cache
def _function(source: str, name: str, device_index: int) -> Function:
    _refuse_capture(f"its kernel {name} cannot be made for cuda:{device_index}")
    try:
        return _made(source, name, device_index)
    except Exception as error:
        raise UnsupportedError(
            f"cuda cannot make its kernel {name} for cuda:{device_index} ({_told(error)}); triton "
            "or reference can be asked for instead"
        ) from error


def _refuse_capture(what: str) -> None:
    """To load a kernel would end the capture, with an error that does not say why.

    What is raised here is not kept: the same call outside does what it is to do.
    """
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            f"cuda: {what} while a CUDA graph is captured; make the same call once before the "
            "capture"
        )


def _made(source: str, name: str, device_index: int) -> Function:
    import cupy

    with _device(device_index):
        module = cupy.RawModule(code=source, options=OPTIONS)
        return Function(module.get_function(name), device_index)


def _device(index: int) -> Any:
    """A context in which CuPy's device is this one."""
    from cupy.cuda import Device

    return Device(index)


@lru_cache(maxsize=64)
def _stream(pointer: int) -> Any:
    """CuPy's name for a stream of torch's."""
    from cupy.cuda import Stream

    return Stream.from_external(_TorchStream(pointer))


class _TorchStream:
    """A stream by the CUDA stream protocol, which torch's own follow since 2.10 only."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        """The protocol's version, and the stream."""
        return 0, self.pointer
