"""What launches ask of a device."""

from __future__ import annotations

from functools import cache

import torch


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a device; 1 where programs run one after another."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
