"""Which weights were evaluated: a record of others is not continued."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

SAMPLES = 4096  # values of each tensor


def fingerprint(model: Any) -> str:
    """What a model with other weights or another config has not.

    Every byte of the weights counts in a sum, and some where they lie: it takes as long as reading
    memory does.
    """
    config = model.config.to_dict()
    config.pop("_name_or_path", None)  # the same model may lie elsewhere
    said = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weights in model.named_parameters():
        said.update(name.encode() + _digest(weights.detach()))
    return said.hexdigest()[:16]


def _digest(weights: torch.Tensor) -> bytes:
    """The sum of a tensor's words, the bytes after them, and values from its first to its last."""
    content = weights.reshape(-1)
    if not len(content):
        return b""
    spread = torch.arange(SAMPLES) * (len(content) - 1) // (SAMPLES - 1)
    samples = content[spread.to(content.device)].cpu()
    octets = content.view(torch.uint8)
    whole = len(octets) // 8 * 8
    # the sum wraps around: exact in any order, on any device
    total = octets[:whole].view(torch.int64).sum().item()
    parts = (octets[whole:].cpu(), samples.view(torch.uint8))
    return str(total).encode() + b"".join(each.numpy().tobytes() for each in parts)
