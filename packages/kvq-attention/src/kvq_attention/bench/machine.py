"""What a record says of the machine that made it."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import kvq_attention
import kvq_codecs


def hardware(device: str) -> str:
    """The processor that computes, in words."""
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        return (
            f"{gpu.name}, {gpu.multi_processor_count} multiprocessors, "
            f"{gpu.L2_cache_size / 2**20:.0f} MiB of L2, {gpu.total_memory / 2**30:.0f} GiB"
        )
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def capability(device: str) -> int | None:
    """The GPU's compute capability, 90 for 9.0; None where there is none."""
    if device != "cuda" or torch.version.hip is not None:
        return None
    major, minor = torch.cuda.get_device_capability(0)
    return 10 * major + minor


def versions(device: str) -> dict[str, str]:
    """Versions by name, those of the GPU's driver and toolkit only where it is used."""
    found = {
        "python": platform.python_version(),
        "kvq-attention": kvq_attention.__version__,
        "kvq-codecs": kvq_codecs.__version__,
        "torch": torch.__version__,
    }
    for name in ("triton", "cupy-cuda12x", "cupy-cuda13x"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    if device == "cuda":
        found["cuda"] = str(torch.version.cuda or torch.version.hip)
        driver = _driver()
        if driver:
            found["driver"] = driver
    return found


def _driver() -> str | None:
    """The NVIDIA driver's version, where its own tool is there to tell."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    said = subprocess.run(query, capture_output=True, check=False, text=True, timeout=30).stdout
    return said.split("\n", 1)[0].strip() or None
