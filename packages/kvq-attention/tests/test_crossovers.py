"""`auto` takes a measured backend where it was the fastest, and says so where it cannot."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from kvq_attention import UnsupportedError, crossovers, support
from kvq_attention.crossovers import Region
from kvq_attention.needs import Need

REGION = Region(
    backend="cuda",
    op="decode",
    formats=(("q4_0", "q4_0"), ("q8_0", "q4_0")),
    head_dims=(128,),
    page_tokens=(16, 32),
    groups=range(1, 9),
    shown_by="docs/benchmarks/attention-h200.json",
)
NEED = Need("decode", "q8_0", "q4_0", 128, 128, 16, "cuda", frozenset({"gqa"}), 4)
MODEL: dict[str, Any] = {
    "formats": [("q8_0", "q4_0")],
    "head_dim": 128,
    "page_tokens": 16,
    "device": "cuda",
    "dtype": torch.bfloat16,
    "features": ["gqa"],
    "group": 4,
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes this process see GPUs, with REGION measured on those of capability 9.0."""

    def sees(*levels: int, unavailable: str | None = None) -> None:
        monkeypatch.setattr(crossovers, "FASTEST", {90: (REGION,)})
        monkeypatch.setattr(crossovers, "levels", lambda: levels)
        for name, reason in (("cuda", unavailable), ("triton", None)):
            stub = ModuleType(f"stub_{name}")
            stub.unavailable = lambda _, reason=reason: reason  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, f"stub_{name}", stub)
            monkeypatch.setitem(support.BACKENDS, name, f"stub_{name}")

    return sees


def test_a_backend_is_taken_where_it_was_the_fastest(machine: Callable[..., None]) -> None:
    machine(90)
    assert support.pick("auto", [NEED]) == "cuda"
    choice = support.choose(**MODEL)
    assert str(choice) == "triton for store, cuda for decode, reference for extend"
    assert choice.passed_over == ("triton lacks extend",)
    # a single call may go elsewhere, of what was measured and not asked for by name
    assert [choice.told(op) for op in support.MODEL_OPS] == ["triton", "auto", "reference"]
    named = support.choose("decode=cuda", **MODEL)
    assert [named.told(op) for op in support.MODEL_OPS] == ["triton", "cuda", "reference"]


@pytest.mark.parametrize(
    "change",
    [
        {"k": "fp8"},
        {"v": "q8_0"},
        {"k_dim": 64, "v_dim": 64},
        {"page_tokens": 64},
        {"group": 16},
        {"device": "cpu"},
        {"op": "extend"},
    ],
)
def test_and_nowhere_else(machine: Callable[..., None], change: dict[str, Any]) -> None:
    machine(90)
    other = replace(NEED, **change)
    assert crossovers.fastest("cuda", [NEED])
    assert not crossovers.fastest("cuda", [other])
    assert not crossovers.fastest("cuda", [NEED, other])
    assert support.pick("auto", [other]) != "cuda"


def test_all_gpus_must_have_been_measured(machine: Callable[..., None]) -> None:
    machine(80, 90)
    assert support.pick("auto", [NEED]) == "triton"
    assert support.pick("cuda", [NEED]) == "cuda"
    assert not crossovers.fastest("cuda", [])


def test_a_fastest_backend_that_cannot_run_is_told(machine: Callable[..., None]) -> None:
    machine(90, unavailable="CuPy is not installed")
    choice = support.choose(**MODEL)
    assert choice.decode == "triton"
    reason = "cuda cannot run on cuda: CuPy is not installed"
    assert choice.passed_over == (reason, "triton lacks extend")
    with pytest.raises(UnsupportedError, match=f"^{reason}; backends that can: triton, reference$"):
        support.pick("cuda", [NEED])


def test_the_levels_are_those_of_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = crossovers.torch.cuda
    monkeypatch.setattr(crossovers.torch.version, "hip", None)
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "device_count", lambda: 3)
    monkeypatch.setattr(cuda, "get_device_capability", [(9, 0), (8, 6), (9, 0)].__getitem__)
    assert crossovers.levels.__wrapped__() == (86, 90)
    monkeypatch.setattr(crossovers.torch.version, "hip", "7.0")
    assert crossovers.levels.__wrapped__() == (0,)
