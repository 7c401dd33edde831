"""What differs between Triton's interpreter and a compiled kernel."""

from __future__ import annotations

from functools import cache

import torch
import triton.language as tl
from triton import knobs

# Read when a kernel is decorated, so it holds for as long as the process lives.
INTERPRETED: bool = bool(knobs.runtime.interpret)

# For kernels: the interpreter computes bf16 wrongly and has no inline assembly.
INTERPRET = tl.constexpr(INTERPRETED)


@cache
def ptx_level(device: torch.device) -> int:
    """Compute capability (80 is 8.0) whose PTX kernels for a device may hold; 0 = none."""
    if device.type != "cuda" or torch.version.hip is not None or INTERPRETED:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def unavailable(device: str) -> str | None:
    """Why Triton's kernels cannot run on a torch device type; None if they can."""
    if device == "cuda":
        return None
    if device == "cpu":
        if INTERPRETED:
            return None
        return (
            "Triton runs on a CPU only in its interpreter (TRITON_INTERPRET=1), which is for tests"
        )
    return f"Triton's kernels run on cuda devices, not on {device}"
