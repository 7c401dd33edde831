"""Tests marked gpu are skipped, visibly, where there is no CUDA device."""

from __future__ import annotations

import importlib.util

import pytest


def has_cuda() -> bool:
    """Whether a CUDA device can be reached; torch is no dependency of this package."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not has_cuda():
        pytest.skip("needs a CUDA device")
