"""The array libraries that every codec must give the same bytes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch


@dataclass(frozen=True)
class Backend:
    """How arrays come from NumPy and go back."""

    name: str
    array: Callable[[np.ndarray], Any]
    numpy: Callable[[Any], np.ndarray]


def to_torch(values: np.ndarray, device: str = "cpu") -> torch.Tensor:
    if values.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(values.view(np.uint16).copy()).view(torch.bfloat16).to(device)
    return torch.from_numpy(np.array(values, order="C")).to(device)


def from_torch(tensor: torch.Tensor) -> np.ndarray:
    return tensor.cpu().numpy()


def to_cupy(values: np.ndarray) -> Any:
    import cupy

    return cupy.asarray(values)


def from_cupy(array: Any) -> np.ndarray:
    import cupy

    return cupy.asnumpy(array)


NUMPY = Backend("numpy", lambda values: values.copy(), lambda array: array)
TORCH = Backend("torch", to_torch, from_torch)
TORCH_CUDA = Backend("torch-cuda", lambda values: to_torch(values, "cuda"), from_torch)
CUPY = Backend("cupy", to_cupy, from_cupy)

on_each_backend = pytest.mark.parametrize(
    "backend",
    [
        pytest.param(NUMPY, id="numpy"),
        pytest.param(TORCH, id="torch"),
        pytest.param(TORCH_CUDA, id="torch-cuda", marks=pytest.mark.gpu),
        pytest.param(CUPY, id="cupy", marks=pytest.mark.gpu),
    ],
)
