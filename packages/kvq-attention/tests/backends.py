"""Backends as tests want them: one more than there are, and a GPU that is not there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from kvq_attention import SUPPORT, support
from kvq_attention.needs import Row

ASKED: dict[str, Any] = {
    "formats": [("q8_0", "q4_0")],
    "head_dim": 64,
    "page_tokens": 16,
    "device": "cpu",
    "dtype": torch.float16,
}
ON_GPU = {**ASKED, "device": "cuda"}
THIRD = tuple(
    Row(
        *(op, "third", feature, "test"),
        codecs=("q8_0", "q4_0"),
        head_dims=(64,),
        page_tokens=(16,),
        devices=("cpu",),
    )
    for op in support.OPS
    for feature in ("plain", "mixed_codecs")
)


def module(name: str, calls: list[str], unavailable: str | None = None) -> ModuleType:
    """A backend that notes which of its ops are called."""

    def record(op: str) -> Any:
        return lambda *_: calls.append(op)

    made = ModuleType(name)
    for op in support.OPS:
        setattr(made, op, record(op))
    made.unavailable = lambda device: unavailable  # type: ignore[attr-defined]
    return made


def without(monkeypatch: pytest.MonkeyPatch, backend: str, op: str) -> None:
    """The backend has no row of the op."""
    rows = tuple(row for row in support.SUPPORT if (row.backend, row.op) != (backend, op))
    assert len(rows) < len(support.SUPPORT)
    monkeypatch.setattr(support, "SUPPORT", rows)


@pytest.fixture
def third(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A backend more, preferred by auto: rows and a module. Returns the calls it gets."""
    calls: list[str] = []
    monkeypatch.setitem(sys.modules, "third_backend", module("third_backend", calls))
    monkeypatch.setattr(support, "BACKENDS", {"third": "third_backend", **support.BACKENDS})
    monkeypatch.setattr(support, "SUPPORT", SUPPORT + THIRD)
    return calls


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Says whether triton runs: without a GPU its rows are looked up as if there were one.

    CUDA's kernels run nowhere.
    """
    monkeypatch.setitem(sys.modules, "nowhere", module("nowhere", [], "no CuPy"))

    def with_triton(unavailable: str | None) -> None:
        monkeypatch.setitem(sys.modules, "stub", module("stub", [], unavailable))
        modules = {**support.BACKENDS, "triton": "stub", "cuda": "nowhere"}
        monkeypatch.setattr(support, "BACKENDS", modules)

    with_triton(None)
    return with_triton
