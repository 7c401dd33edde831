"""`auto` takes a measured backend where it was the fastest, and says so where it cannot."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kvq_attention import UnsupportedError, crossovers, support
from kvq_attention.bench import fastest
from kvq_attention.crossovers import Region
from kvq_attention.needs import Need

REGION = Region(
    backend="cuda",
    op="decode",
    formats=(("q4_0", "q4_0"), ("q8_0", "q4_0")),
    head_dims=(128,),
    page_tokens=(16, 32),
    groups=range(1, 9),
    shown_by=("docs/benchmarks/attention-h200.json",),
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
    assert str(choice) == "triton for store and extend, cuda for decode"
    assert choice.passed_over == ()
    # a single call may go elsewhere, of what was measured and not asked for by name
    assert [choice.told(op) for op in support.MODEL_OPS] == ["triton", "auto", "triton"]
    named = support.choose("decode=cuda", **MODEL)
    assert [named.told(op) for op in support.MODEL_OPS] == ["triton", "cuda", "triton"]


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
    assert choice.passed_over == (reason,)
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


ROOT = Path(__file__).parents[3]


def unproven(known: Mapping[int, tuple[Region, ...]], root: Path) -> list[str]:
    """Calls that a region holds and its records do not show, a line each."""
    found = []
    for level, regions in known.items():
        for region in regions:
            records = {path: json.loads((root / path).read_text()) for path in region.shown_by}
            if {record.get("capability") for record in records.values()} != {level}:
                found.append(f"{region.shown_by} is not of compute capability {level}")
            shown = fastest.regions(records, region.backend)
            for (k, v), dim, size, group in product(
                region.formats, region.head_dims, region.page_tokens, region.groups
            ):
                need = Need(region.op, k, v, dim, dim, size, "cuda", group=group)
                if not any(each.holds(region.backend, need) for each in shown):
                    found.append(f"{k}, {v}, head_dim {dim}, page {size}, group {group}")
    return found


@pytest.mark.skipif(not (ROOT / "noxfile.py").is_file(), reason="records are in the repository")
def test_every_region_follows_from_its_records() -> None:
    assert unproven(crossovers.FASTEST, ROOT) == []


@pytest.mark.skipif(not (ROOT / "noxfile.py").is_file(), reason="records are in the repository")
def test_all_that_the_records_show_is_in_a_region_but_bf16_and_fp16() -> None:
    for regions in crossovers.FASTEST.values():
        for paths in {region.shown_by for region in regions}:
            records = {path: json.loads((ROOT / path).read_text()) for path in paths}
            lacking = {
                (k, v)
                for shown in fastest.regions(records, "cuda")
                for (k, v), dim, size, group in product(
                    shown.formats, shown.head_dims, shown.page_tokens, shown.groups
                )
                for need in [Need("decode", k, v, dim, dim, size, "cuda", group=group)]
                if not any(region.holds("cuda", need) for region in regions)
            }
            assert lacking <= {("bf16", "bf16"), ("fp16", "fp16")}


def test_a_region_beyond_its_record_is_found(tmp_path: Path) -> None:
    def row(backend: str, codec: str, us: float) -> dict[str, Any]:
        at = {"case": "8x4k", "shape": "32/8x128", "page_tokens": 16, "codec": codec}
        return {**at, "backend": backend, "us": us, "speed_up": 30 / us, "error": 1e-3}

    rows = [row("cuda", "q4_0", 10), row("triton", "q4_0", 12), row("triton", "q8_0", 20)]
    record = {"capability": 90, "decode": [*rows, row("cuda", "q8_0", 40)]}
    (tmp_path / "record.json").write_text(json.dumps(record))
    shown = Region("cuda", "decode", (("q4_0",) * 2,), (128,), (16,), range(4, 5), ("record.json",))
    assert unproven({90: (shown,)}, tmp_path) == []
    assert unproven({80: (shown,)}, tmp_path) == [
        "('record.json',) is not of compute capability 80"
    ]
    for change, said in (
        ({"formats": (("q8_0",) * 2,)}, "q8_0, q8_0, head_dim 128, page 16, group 4"),
        ({"head_dims": (64,)}, "q4_0, q4_0, head_dim 64, page 16, group 4"),
        ({"page_tokens": (64,)}, "q4_0, q4_0, head_dim 128, page 64, group 4"),
        ({"groups": range(4, 6)}, "q4_0, q4_0, head_dim 128, page 16, group 5"),
    ):
        assert unproven({90: (replace(shown, **change),)}, tmp_path) == [said]
