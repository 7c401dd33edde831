"""The merge: any number of warps makes the same bits, and as many are launched as fit at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvq_attention import Scoring
from kvq_attention.cuda import decode, items

from ..decode.cases import check_output
from ..scene import TIER, Geometry, build
from . import emulated
from .emulator.program import needs_compiler

pytestmark = needs_compiler

CHUNK = 32  # tokens
# Chunks of requests: one, less than a run, and runs of which a block's warps have several each.
CHUNKS = (1, 5, 8 * 17 + 3)


@pytest.mark.parametrize(
    ("codec", "dim", "sinks"), [("q8_0", 64, True), ("iso4", 128, False), ("q4_0", 256, True)]
)
def test_any_number_of_warps_makes_the_same_bits(codec: str, dim: int, sinks: bool) -> None:
    lengths = tuple(CHUNK * chunks - 3 for chunks in CHUNKS)
    shape: dict[str, Any] = {"heads": 4, "kv_heads": 2, "dim": dim, "lengths": lengths}
    scene = build(Geometry(codec, **shape, dtype=torch.float32), stored_queries=True)
    scoring = {"sinks": torch.linspace(-2, 3, 4)} if sinks else {}
    outputs = []
    with pytest.MonkeyPatch.context() as patch:
        for name in emulated.CHUNK_SIZES:
            patch.setattr(items, name, CHUNK)
        emulated.emulate(patch)
        load = decode.load
        for i in range(len(decode.MERGE_WARPS)):

            def one(*given: Any, i: int = i) -> decode.Kernels:
                kernels = load(*given)
                return replace(kernels, merges=kernels.merges[i : i + 1])

            patch.setattr(decode, "load", one)
            call = (scene.q, *scene.caches, scene.batch(), TIER, Scoring(scene.scale, **scoring))
            outputs.append(decode.decode(*call))
    check_output(scene, outputs[0], **scoring)
    for out in outputs[1:]:
        assert torch.equal(out, outputs[0])


class Launched:
    """A kernel that notes its launches and does nothing."""

    def __init__(self, launches: list[tuple[str, int]], name: str) -> None:
        self.launches, self.name = launches, name

    def launch_beside(self, grid: tuple[int, ...], *_: Any) -> None:
        """Instead of a launch."""
        self.launches.append((self.name, grid[0]))


@pytest.mark.parametrize(
    ("dim", "rows", "merge"),
    [
        (128, 2, "wide"),
        (128, 3, "middle"),
        (256, 2, "middle"),
        (128, 8, "middle"),
        (128, 9, "thin"),
    ],
)
def test_the_most_warps_are_launched_whose_blocks_run_at_once(
    dim: int, rows: int, merge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[tuple[str, int]] = []
    merges = tuple(
        decode.Merge(Launched(launches, name), 32, 0, resident)
        for name, resident in (("wide", 2), ("middle", 8), ("thin", 8))
    )
    step = Launched(launches, "decode")
    monkeypatch.setattr(decode, "picked", emulated.picked)
    kernels = decode.Kernels(step, merges, 0, 3)
    monkeypatch.setattr(decode, "load", lambda *_: kernels)
    shape: dict[str, Any] = {"heads": rows, "kv_heads": 1, "dim": dim, "lengths": (1100,)}
    scene = build(Geometry("q8_0", **shape, dtype=torch.float32), stored_queries=True)
    decode.decode(scene.q, *scene.caches, scene.batch(), TIER, Scoring(scene.scale))
    assert launches[1:] == [(merge, rows * dim // 128)]
