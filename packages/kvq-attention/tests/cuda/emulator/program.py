"""Kernels run on the CPU: g++ compiles their text together with the emulator of a block.

    program = build('#include "primitives.cuh" …', ["double_all"])
    program.launch("double_all", grid=1, threads=32, args=[array, ctypes.c_int(8)])

A launch raises what a GPU would answer with wrong numbers or a hang: lanes of a warp that are not
at the same instruction, threads that miss a barrier, shared memory that is left or not aligned.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import kvq_attention

SOURCE = Path(kvq_attention.__file__).parent / "cuda" / "source"
EMULATOR = Path(__file__).parent
# Most kernels run for less time than they are compiled. Fibers jump between stacks, which fortified
# longjmp takes for an attack; kernels read bytes as words, which C++ calls aliasing.
# Races are looked for by what each access calls; lines are told by addr2line.
FOLLOWING = ("-DFIND_RACES", "-fsanitize=thread", "-g1")
FLAGS = (
    *("-Og", "-std=c++17", "-fPIC", "-ffp-contract=off"),
    *("-fno-strict-aliasing", "-U_FORTIFY_SOURCE"),
)

OFFSET = re.compile(r"\+(0x[0-9a-f]+)")

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

Argument = (
    torch.Tensor
    | np.ndarray
    | np.generic
    | ctypes._SimpleCData
    | ctypes.Structure
    | int
    | float
    | None
)


class EmulationError(Exception):
    """A kernel did what must not be done on a GPU."""


class _Launch(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("grid", "threads", "shared_bytes")),
        *((name, ctypes.c_int) for name in ("late", "backward")),
    )


class _Argument(ctypes.Structure):
    _fields_ = (("value", ctypes.c_void_p), ("bytes", ctypes.c_int), ("kind", ctypes.c_char))


@dataclass(frozen=True)
class Program:
    """Kernels that were compiled for the CPU."""

    compiled: ctypes.CDLL
    path: Path

    def launch(
        self,
        kernel: str,
        *,
        grid: int | tuple[int, ...],
        threads: int,
        args: Sequence[Argument],
        shared_bytes: int = 0,
        late: bool = False,
        backward: bool = False,
    ) -> None:
        """Run all blocks of a kernel, one after another; raises EmulationError.

        args: CPU tensors, arrays and None for pointers, int for integers of 32 or 64 bits, float
        for float, NumPy scalars and ctypes values for what they are. late: asynchronous copies
        arrive only when they are waited for. backward: the last warp and lane run first.
        """
        blocks, *more = (grid,) if isinstance(grid, int) else grid
        if more.count(1) != len(more):
            raise ValueError(f"grid is {grid}; kernels know no blocks but those along x")
        if threads % 32 or not 0 < threads <= 1024:
            raise ValueError(f"threads is {threads}; a block has 32, 64, … 1024")
        values = [_value(arg) for arg in args]
        given = zip(args, values, strict=True)
        arguments = (_Argument * len(values))(*(_argument(arg, value) for arg, value in given))
        run = getattr(self.compiled, f"emulate_{kernel}")
        run.restype = ctypes.c_char_p
        shape = _Launch(blocks, threads, shared_bytes, late, backward)
        failure = run(ctypes.byref(shape), arguments, len(values))
        if failure is not None:
            said = OFFSET.sub(self._line, failure.decode())
            raise EmulationError(f"{kernel}: {said}")

    def _line(self, offset: re.Match[str]) -> str:
        """Where an offset in the library comes from: lines, inlined into each other."""
        tool = shutil.which("addr2line")
        if tool is None:
            return offset[0]
        done = subprocess.run(
            [tool, "--inlines", "-e", str(self.path), offset[1]],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        lines = [line.rpartition("/")[2].split(" ")[0] for line in done.stdout.splitlines()]
        kernels = [line for line in lines if ".cu" in line and not line.startswith("warp.cuh")]
        return " in ".join(kernels or lines)

    def function(self, kernel: str, *, late: bool = False, backward: bool = False) -> Function:
        """A kernel, to be launched as one on a GPU is."""
        return Function(self, kernel, late, backward)


@dataclass(frozen=True)
class Function:
    """A kernel with the `launch` of kvq_attention.cuda.module.Function."""

    program: Program
    name: str
    late: bool = False
    backward: bool = False

    def launch(
        self, grid: tuple[int, ...], threads: int, shared_bytes: int, args: Sequence[Argument]
    ) -> None:
        """Run all blocks, one after another."""
        self.program.launch(
            self.name,
            grid=grid,
            threads=threads,
            shared_bytes=shared_bytes,
            args=args,
            late=self.late,
            backward=self.backward,
        )

    # Of a kernel that waits for the one before it, which ends before it begins here.
    launch_beside = launch


def build(
    text: str,
    kernels: Sequence[str],
    *,
    arch: int = 90,
    defines: Mapping[str, str | int] | None = None,
    include: Sequence[Path] = (),
    races: bool = False,
) -> Program:
    """Compile a text and offer the `extern "C" GLOBAL void` functions named; kept by content.

    arch: what KVQ_ARCH is. include: folders to look for headers in, after the package's own. races:
    look for accesses of shared memory that no barrier orders, which takes several times as long.
    Raises RuntimeError with what the compiler said.
    """
    entries = [
        f'extern "C" const char* emulate_{name}(const emulator::Launch* shape,'
        f" const emulator::Argument* args, int count) {{"
        f" return emulator::launch({name}, *shape, args, count); }}"
        for name in kernels
    ]
    macros = [f"#define {name} {value}" for name, value in (defines or {}).items()]
    whole = "\n".join((*macros, '#line 1 "kernel.cu"', text, '#include "emulator.h"', *entries))
    folders = (SOURCE, EMULATOR, *include)
    return _load(f"#define KVQ_ARCH {arch}\n{whole}\n", folders, FOLLOWING if races else ())


@functools.cache
def _load(text: str, folders: tuple[Path, ...], more: tuple[str, ...]) -> Program:
    command = ["g++", "-c", *FLAGS, *more, *(f"-I{each}" for each in folders), "-x", "c++", "-"]
    key = hashlib.sha256(repr((command, text)).encode())
    for folder in folders:
        for header in sorted((*folder.rglob("*.cuh"), *folder.rglob("*.h"))):
            key.update(header.read_bytes())
    kept = _folder() / f"{key.hexdigest()[:32]}.so"
    if not kept.exists():
        fresh = kept.with_suffix(f".{os.getpid()}")
        # Linked by itself: the sanitizer's own library answers no calls.
        for step in ([*command, "-o", f"{fresh}.o"], ["g++", "-shared", f"{fresh}.o", "-o", fresh]):
            done = subprocess.run(step, input=text, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"g++ failed:\n{done.stderr[:8000]}")
        Path(f"{fresh}.o").unlink()
        fresh.replace(kept)
    return Program(ctypes.CDLL(str(kept)), kept)


def _folder() -> Path:
    """A folder of this user's that outlives the run."""
    folder = Path(tempfile.gettempdir()) / f"kvq-emulator-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise RuntimeError(f"{folder} belongs to another user; remove it")
    return folder


def _value(arg: Argument) -> ctypes._SimpleCData | ctypes.Structure | ctypes.Array:
    """Memory that holds what the kernel is given."""
    if isinstance(arg, np.ndarray):
        if not arg.flags.c_contiguous:
            raise ValueError(
                "an array is not contiguous; a kernel that takes strides takes a tensor"
            )
        return ctypes.c_void_p(arg.ctypes.data)
    if isinstance(arg, torch.Tensor):
        if arg.device.type != "cpu":
            raise TypeError(f"a tensor is on {arg.device}; the emulator runs on CPU tensors")
        return ctypes.c_void_p(arg.data_ptr())
    if isinstance(arg, np.generic):
        return (ctypes.c_char * arg.nbytes).from_buffer_copy(arg.tobytes())
    if isinstance(arg, ctypes._SimpleCData | ctypes.Structure):
        return arg
    if isinstance(arg, int):
        return ctypes.c_int64(arg)  # the low half comes first
    if isinstance(arg, float):
        return ctypes.c_float(arg)
    if arg is None:
        return ctypes.c_void_p(None)
    raise TypeError(f"an argument is a {type(arg).__name__}; pass a tensor, an array or a number")


def _argument(arg: Argument, value: ctypes._SimpleCData | ctypes.Structure) -> _Argument:
    if isinstance(value, ctypes.c_void_p):
        kind = b"p"
    elif isinstance(value, ctypes.Structure):
        kind = b"s"
    elif isinstance(arg, np.floating) or isinstance(value, ctypes.c_float | ctypes.c_double):
        kind = b"f"
    else:
        kind = b"i"
    size = 0 if type(arg) is int else ctypes.sizeof(value)
    return _Argument(ctypes.addressof(value), size, kind)
