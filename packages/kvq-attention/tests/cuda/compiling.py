"""Compile the decode kernels for GPUs that are not there, on all cores.

`run` starts this file: `python compiling.py` reads a JSON list of `Job`, prints one of `Compiled`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context

import torch

from kvq_attention.cuda import compile as compiler
from kvq_attention.cuda import decode, shapes
from kvq_attention.cuda.compile import Resources

# KiB of shared memory of a multiprocessor (CUDA's programming guide, compute capabilities)
SHARED_KIB = {80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}
REGISTERS = 65536  # of a multiprocessor


@dataclass(frozen=True)
class Job:
    """A kernel as a call would have it compiled.

    Attributes
    ----------
    k, v, dim, dtype, softcap, one_tile : of the call
    rows : query rows that a request likely has
    arch : compute capability
    merge_warps : 0 = decode, else the merge with so many warps
    """

    k: str
    v: str
    arch: int
    dim: int = 128
    rows: int = 4
    dtype: str = "bfloat16"
    softcap: bool = False
    one_tile: bool = True
    merge_warps: int = 0


@dataclass(frozen=True)
class Compiled:
    """What a kernel takes.

    Attributes
    ----------
    job, resources : the kernel, and what the compiler says of it
    rows : query rows of a piece
    registers_left : that a thread may have, if as many blocks run at once as shall
    """

    job: Job
    resources: Resources
    rows: int
    registers_left: int


def run(jobs: Iterable[Job]) -> list[Compiled]:
    """The kernels of these jobs, compiled in processes."""
    given = json.dumps([asdict(job) for job in jobs])
    done = subprocess.run(
        [sys.executable, __file__], input=given, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-8000:])
    return [
        Compiled(Job(**one.pop("job")), Resources(**one.pop("resources")), one["rows"], one["left"])
        for one in json.loads(done.stdout)
    ]


def compiled(job: Job) -> dict[str, object]:
    """What `run` makes a `Compiled` of."""
    sizes = decode.sizes(job.k, job.v, job.dim)
    shape = shapes.pick(sizes, job.rows, SHARED_KIB[job.arch] << 10)
    dtype = getattr(torch, job.dtype)
    if job.merge_warps:
        name, warps = "merge", job.merge_warps
        defines = decode.merge_defines(job.v, job.dim, dtype, shape.rows, warps)
    else:
        name, warps = "decode", shape.warps
        given = (job.k, job.v, job.dim, dtype, shape, job.softcap, job.one_tile)
        defines = decode.defines(*given)
    cubin = compiler.compile(compiler.source(f"{name}.cu", defines), job.arch)
    ((found, resources),) = compiler.resources(cubin).items()
    assert found == name
    blocks = 1 if job.merge_warps else shape.blocks
    left = min(255, REGISTERS // (32 * warps * blocks) // 8 * 8)
    return {
        "job": asdict(job),
        "resources": asdict(resources),
        "rows": shape.rows,
        "left": left,
    }


def main() -> None:
    """Compile the jobs."""
    jobs = [Job(**given) for given in json.load(sys.stdin)]
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        json.dump(list(pool.map(compiled, jobs)), sys.stdout)


if __name__ == "__main__":
    main()
