"""The formats: a module per codec, named as the codec, holds what kernels know of it."""

from __future__ import annotations

import functools
from importlib import import_module
from types import ModuleType


@functools.cache
def get(codec: str) -> ModuleType:
    """The module of a codec's jit functions; `ModuleNotFoundError` if Triton has none."""
    return import_module(f"{__name__}.{codec}")
