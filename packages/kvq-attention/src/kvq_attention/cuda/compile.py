"""CUDA C++ text → machine code, by NVRTC, with no GPU needed.

A kernel is one text: CuPy's cache on disk knows a kernel by its text alone, so that headers are
written into it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources as package_files

from kvq_attention.errors import UnsupportedError

SOURCE = package_files.files("kvq_attention.cuda") / "source"

INSTALL = "pip install 'kvq-attention[cuda]'"

# What kernels are compiled with, and what CuPy's RawModule adds on its own.
OPTIONS = ("-std=c++17",)
ADDED_BY_CUPY = ("-ftz=true", "--device-as-default-execution-space")

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+(?:"([^"\n]+)"|(\w+))[ \t]*$', re.MULTILINE)
_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[ \t]*$", re.MULTILINE)
_ENTRY = re.compile(r"Compiling entry function '(\w+)'")


@dataclass(frozen=True, slots=True)
class Cubin:
    """Machine code of a text's kernels.

    Attributes
    ----------
    arch : compute capability (90 is 9.0) that it is for
    code : the ELF file
    log : what the compiler said, resources included
    """

    arch: int
    code: bytes
    log: str


@dataclass(frozen=True, slots=True)
class Resources:
    """What a kernel takes.

    Attributes
    ----------
    registers : of a thread
    stack_bytes : of a thread
    shared_bytes : of a block, without those that a launch adds
    spill_store_bytes, spill_load_bytes : of a thread, by all its instructions for spilled registers
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int


def source(name: str, defines: Mapping[str, str | int]) -> str:
    """A file of the folder `source` as one text.

    Each header stands where it is included first; paths start at that folder. A define may hold
    the quoted path of a header: `#include FORMAT` with FORMAT = '"formats/q4_0.cuh"'.

    Parameters
    ----------
    name : path of the file
    defines : macros, defined before all else, in order

    Raises `FileNotFoundError` for a header that is not there and `KeyError` for a macro that is
    included and not defined.
    """
    macros = "".join(f"#define {macro} {value}\n" for macro, value in defines.items())
    return macros + _inlined(name, defines, set())


def compile(source: str, arch: int) -> Cubin:
    """Compile a text as a device of compute capability `arch` would get it.

    Raises `UnsupportedError` where CuPy is not installed, and `RuntimeError` with the compiler's
    log when the text does not compile.
    """
    try:
        from cupy.cuda import nvrtc
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"NVRTC is called through CuPy: {error}; {INSTALL}") from None
    program = nvrtc.createProgram(source, "kernel.cu", (), ())
    try:
        options = (*OPTIONS, *ADDED_BY_CUPY, f"-arch=sm_{arch}", "--ptxas-options=-v")
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise RuntimeError(f"{error} for sm_{arch}\n{log}") from None
        return Cubin(arch, nvrtc.getCUBIN(program), nvrtc.getProgramLog(program))
    finally:
        nvrtc.destroyProgram(program)


def resources(cubin: Cubin) -> dict[str, Resources]:
    """What each kernel takes, by its name."""
    _, *parts = _ENTRY.split(cubin.log)
    return {
        name: _resources(name, said) for name, said in zip(parts[::2], parts[1::2], strict=True)
    }


def _resources(name: str, said: str) -> Resources:
    """From what the log says of one kernel, and of functions that it calls."""
    stack = re.search(
        rf"Function properties for {name}\n\D*(\d+) bytes stack frame, "
        r"(\d+) bytes spill stores, (\d+) bytes spill loads",
        said,
    )
    registers = re.search(r"Used (\d+) registers", said)
    shared = re.search(r"(\d+) bytes smem", said)
    if stack is None or registers is None:
        raise RuntimeError(f"the compiler's log does not say what {name} takes:\n{said}")
    return Resources(
        registers=int(registers[1]),
        stack_bytes=int(stack[1]),
        shared_bytes=int(shared[1]) if shared else 0,
        spill_store_bytes=int(stack[2]),
        spill_load_bytes=int(stack[3]),
    )


def _inlined(name: str, defines: Mapping[str, str | int], seen: set[str]) -> str:
    """A file with its headers in it, but for those seen; `#line` keeps the places of errors."""
    seen.add(name)
    text = _ONCE.sub("", (SOURCE / name).read_text(encoding="utf-8"))
    parts, at = [f'#line 1 "{name}"\n'], 0
    for found in _INCLUDE.finditer(text):
        header = found[1] or str(defines[found[2]]).strip('"')
        next_line = text.count("\n", 0, found.start()) + 2
        body = "" if header in seen else _inlined(header, defines, seen)
        parts += [text[at : found.start()], body, f'#line {next_line} "{name}"']
        at = found.end()
    return "".join([*parts, text[at:], "" if text.endswith("\n") else "\n"])
