"""Compile Triton kernels for GPUs that are not there.

A module beside this one offers `jobs()`: calls of launchers on CPU tensors, by name. Launches are
caught instead of run, and each is compiled as Triton would for the same arguments: pointers and
strides that 16 divides, integers that are 1, and constants are part of what is compiled.

TRITON_INTERPRET is read when kernels are decorated, so `run` starts this file without it:
`python compiling.py MODULE… --arch 80 …` prints a JSON list of `Compiled`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

Jobs = Iterator[tuple[str, Callable[[], object]]]

ARCHS = (80, 86, 89, 90, 100, 120)
AMD = (942,)  # gfx942
# KiB of shared memory that a program can have (CUDA's programming guide, compute capabilities;
# AMD's CDNA3 ISA)
PROGRAM_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99, 942: 64}


@dataclass(frozen=True)
class Compiled:
    """One kernel for one architecture.

    Attributes
    ----------
    job, kernel, arch : what was compiled
    registers, stack_bytes, shared_bytes : of a thread, a thread and a program
    local_accesses, in_loops : instructions that load or store the stack, where spilled registers
        lie, and those among them in innermost loops of matrix products
    numbers : constants and options of the launch that are integers
    ptx : instructions, without operands, that occur in the PTX
    """

    job: str
    kernel: str
    arch: int
    registers: int
    stack_bytes: int
    local_accesses: int
    in_loops: int
    shared_bytes: int
    numbers: dict[str, int]
    ptx: list[str]


def run(modules: Sequence[str], archs: Sequence[int], cache: Path) -> list[Compiled]:
    """The kernels of all jobs of the modules for each architecture, compiled in processes."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, __file__, *modules, "--arch", *map(str, archs)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-8000:]}")
    return [Compiled(**item) for item in json.loads(done.stdout)]


@dataclass(frozen=True)
class Launch:
    """A kernel with the arguments and options of one launch."""

    kernel: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def compile(self, arch: int) -> Any:
        """What Triton would run for this launch on a GPU of that architecture."""
        target = GPUTarget("hip", f"gfx{arch}", 64) if arch in AMD else GPUTarget("cuda", arch, 32)
        backend = make_backend(target)
        kernel, kwargs = self.kernel, {"debug": False, **self.kwargs}
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialization, options = bind(*self.args, **kwargs)
        options, signature, constants, attrs = kernel._pack_args(
            backend, kwargs, bound, specialization, options
        )
        source = ASTSource(kernel, signature, constants, attrs)
        return triton.compile(source, target=target, options=options.__dict__)


@contextmanager
def catching() -> Iterator[list[Launch]]:
    """Catch the launches of a block instead of running them."""
    launches: list[Launch] = []

    def catch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append(Launch(self, args, kwargs))

    run = JITFunction.run
    JITFunction.run = catch
    try:
        yield launches
    finally:
        JITFunction.run = run


def compiled(module: str, name: str, arch: int) -> list[Compiled]:
    """The kernels that one job launches, for one architecture."""
    jobs = import_module(module)
    device = getattr(jobs, "device", lambda _arch: nullcontext())
    with catching() as launches, device(arch):
        dict(jobs.jobs())[name]()
    if not launches:
        raise RuntimeError(f"{module}: {name} launched nothing")
    return [describe(name, arch, launch) for launch in launches]


def describe(job: str, arch: int, launch: Launch) -> Compiled:
    made = launch.compile(arch)
    if arch in AMD:
        return describe_amd(job, arch, launch, made)
    usage = resource_usage(made.asm["cubin"])
    stack_bytes = usage["STACK"] + usage["LOCAL"]
    code = tool("nvdisasm", "-c", made.asm["cubin"]) if stack_bytes else ""
    stack, inner = stack_accesses(code), loops(code)
    return Compiled(
        job,
        launch.kernel.fn.__name__,
        arch,
        registers=usage["REG"],
        stack_bytes=stack_bytes,
        local_accesses=len(stack),
        in_loops=len([at for at in stack if any(at in loop for loop in inner)]),
        shared_bytes=made.metadata.shared,
        numbers={name: n for name, n in launch.kwargs.items() if type(n) is int},
        ptx=instructions(made.asm["ptx"]),
    )


def describe_amd(job: str, arch: int, launch: Launch, made: Any) -> Compiled:
    """By what LLVM writes beside the machine code; it does not say where it spills registers."""
    text = made.asm["amdgcn"]

    def said(name: str) -> int:
        return int(re.findall(rf"\.{name}:\s+(\d+)", text)[0])

    return Compiled(
        job,
        launch.kernel.fn.__name__,
        arch,
        registers=said("vgpr_count"),
        stack_bytes=said("private_segment_fixed_size"),
        local_accesses=said("vgpr_spill_count"),
        in_loops=0,
        shared_bytes=made.metadata.shared,
        numbers={name: n for name, n in launch.kwargs.items() if type(n) is int},
        ptx=sorted(set(re.findall(r"^\s+([sv]_\w+)", text, re.M))),
    )


def instructions(ptx: str) -> list[str]:
    """The opcodes in a PTX text: 'div.rn.f32', …"""
    body = re.sub(r"//[^\n]*", "", ptx)
    return sorted(set(re.findall(r"^\s*(?:@!?%\w+\s+)?([a-z]\w*\.[\w.:]+)[\s;]", body, re.M)))


def stack_accesses(code: str) -> list[int]:
    """Lines of machine code that load or store the stack."""
    return [at for at, line in enumerate(code.splitlines()) if re.search(r"\b(LDL|STL)\b", line)]


def loops(code: str) -> list[range]:
    """Lines of the innermost loops that hold a matrix product: from a label to a branch back."""
    lines = code.splitlines()
    labels = {line[: line.index(":")]: at for at, line in enumerate(lines) if line[:3] == ".L_"}
    found = []
    for at, line in enumerate(lines):
        target = re.search(r"\bBRA\b.*`\((\.L_\w+)\)", line)
        if target and labels[target[1]] <= at:
            loop = range(labels[target[1]], at + 1)
            if any("MMA" in lines[i] for i in loop):
                found.append(loop)
    return [a for a in found if not any(b[0] in a and b[-1] in a and a != b for b in found)]


def resource_usage(cubin: bytes) -> dict[str, int]:
    """REG, STACK, SHARED, LOCAL, … of a cubin's kernel."""
    said = tool("cuobjdump", "--dump-resource-usage", cubin)
    line = next(line for line in said.splitlines() if "REG:" in line)
    return {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", line)}


def tool(name: str, option: str, cubin: bytes) -> str:
    """What one of the tools in Triton's wheel says of a cubin."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(path), option, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Compile every job of the modules for every architecture, on all cores."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("modules", nargs="+")
    parser.add_argument("--arch", type=int, nargs="+", required=True)
    given = parser.parse_args()
    work = [
        (module, name, arch)
        for module in given.modules
        for name, _ in import_module(module).jobs()
        for arch in given.arch
    ]
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        found = [c for part in pool.map(compiled, *zip(*work, strict=True)) for c in part]
    json.dump([asdict(c) for c in found], sys.stdout)


if __name__ == "__main__":
    main()
