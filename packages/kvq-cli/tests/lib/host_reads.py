"""What a step asks of a device that its host would have to wait for."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Ops whose result, or its shape, is read on the host. `torch.histc` is none where its range is
# given, as experts do.
READING = (
    *("_local_scalar_dense.", "nonzero.", "is_nonzero.", "masked_select.", "equal."),
    *("bincount.", "repeat_interleave.Tensor."),
)


class HostReads(TorchDispatchMode):
    """Notes them, by the op's name: no CUDA graph can be captured of a step with one."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func).removeprefix("aten.")
        masks = name.startswith("index") and any(map(_holds_mask, args))
        if masks or f"{name}.".startswith(READING):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def _holds_mask(indices: object) -> bool:
    """Whether these are indices of which one is a mask, whose rows have to be counted."""
    return isinstance(indices, list | tuple) and any(
        isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
        for index in indices
    )
