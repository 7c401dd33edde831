"""iso's quaternions, where kernels read them."""

from __future__ import annotations

from functools import cache

import torch

from kvq_codecs.rotation import QUATERNIONS


@cache
def quaternions(device: torch.device) -> torch.Tensor:
    """(w, x, y, z) of the groups of a block, float32 [32, 4], on a device."""
    return torch.from_numpy(QUATERNIONS.copy()).to(device)
