"""What there is to compute with: devices, types, free memory."""

from __future__ import annotations

import ctypes
import gc
import os
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import torch

from kvq_cli import cgroups
from kvq_cli.config import ConfigError

# Share of the memory that is free before loading which weights, workspace and cache may take
# together: a CPU shares its memory with everything else, a GPU mostly does not.
MEMORY_RATIO = {"cpu": 0.6, "cuda": 0.9}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: str) -> torch.device:
    """The device of a name, "auto" among them; `ConfigError` when there is none."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda was asked for and torch finds none; use --device cpu")
    return torch.device(name)


def choose_dtype(name: str, device: torch.device, config: Any) -> torch.dtype:
    """The type of weights and of what is computed with them.

    Parameters
    ----------
    name : of the type, or "auto"
    config : transformers', which declares the type that the model was trained in
    """
    if name == "auto":
        # CPUs compute float32 fastest and most exactly; GPUs run what the model was trained in
        if device.type == "cpu":
            return torch.float32
        declared = getattr(config, "dtype", None)
        return next((d for d in DTYPES.values() if d == declared), torch.bfloat16)
    if name not in DTYPES:
        raise ConfigError(f"dtype must be auto or one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def choose_threads(wanted: int | None) -> int:
    """Threads that a CPU computes a step with.

    By default as many as torch would take, but no more than the process may run at the same
    time: of two threads on one processor each waits for the other at the end of every operation.
    """
    if wanted is not None:
        return wanted
    allowed = [float(torch.get_num_threads())]
    if hasattr(os, "sched_getaffinity"):  # Linux
        allowed.append(len(os.sched_getaffinity(0)))
    if (share := cgroups.cpus()) is not None:
        allowed.append(share)
    return max(1, int(min(allowed)))


def trim() -> None:
    """Give back to the system what the C library keeps of freed memory, where it can (glibc).

    What computing at a start has used stays with the process otherwise, up to some 100 MiB.
    """
    gc.collect()
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if give_back is not None:
        give_back(0)


def mapped_bytes(weights: Iterable[torch.Tensor], maps: Path = Path("/proc/self/maps")) -> int:
    """Bytes of weights that are mapped files, which Linux counts as memory that could be had.

    0 on other systems: there what was read of a file counts as used, as long as it stays.

    Parameters
    ----------
    maps : Linux's list of what this process has mapped
    """
    if not maps.exists():
        return 0
    lines = (line.split(maxsplit=5) for line in maps.read_text().splitlines())
    # address range, permissions, offset, device, inode, and what is mapped there
    files = sorted(
        tuple(int(end, 16) for end in fields[0].split("-")) for fields in lines if fields[4] != "0"
    )
    total = 0
    for each in weights:
        before = bisect_right(files, each.data_ptr(), key=lambda ends: ends[0])
        on_host = each.device.type == "cpu"
        if on_host and before and each.data_ptr() < files[before - 1][1]:
            total += each.nbytes
    return total


def free_bytes(device: torch.device, mapped_bytes: int = 0) -> int:
    """Bytes of a device's memory that can be allocated now; a container's limit counts.

    Parameters
    ----------
    mapped_bytes : of the host's memory, which count as used though the system may not say so;
        below 0 where not even they have room
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what torch keeps unused is free
        return int(torch.cuda.mem_get_info(device)[0])
    available = int(psutil.virtual_memory().available) - mapped_bytes
    limit = cgroups.free_bytes(mapped_bytes=mapped_bytes)
    return available if limit is None else min(available, limit)
