"""No two lanes touch the same bytes of shared memory without a barrier between them.

What compute-sanitizer's racecheck looks for on a GPU, on kernels that the emulator runs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvq_attention import Scoring
from kvq_attention.cuda import decode, formats

from ..scene import TIER, Geometry, build
from . import emulated
from .emulator import program
from .emulator.program import EmulationError, Program, needs_compiler

pytestmark = needs_compiler

KERNELS = """
#include "primitives.cuh"
#define KERNEL(name, ...) extern "C" GLOBAL void name(u32* out, int synced, ##__VA_ARGS__)

KERNEL(handed_over) {
  u32* shared = reinterpret_cast<u32*>(shared_memory());
  shared[32 * warp() + lane()] = lane();
  if (synced == 1) sync_warp();
  if (synced == 2) sync_block();
  if (synced == 3) any(true);
  out[32 * warp() + lane()] = shared[32 * warp() + (lane() ^ 1)];
}

KERNEL(of_another_warp) {
  u32* shared = reinterpret_cast<u32*>(shared_memory());
  shared[32 * warp() + lane()] = lane();
  if (synced == 1) sync_warp();
  if (synced == 2) sync_block();
  out[32 * warp() + lane()] = shared[32 * (1 - warp()) + lane()];
}

KERNEL(loaded) {
  u32* shared = reinterpret_cast<u32*>(shared_memory());
  for (int i = lane(); i < 128; i += 32) shared[i] = i;
  sync_warp();
  u32 r[4];
  load_matrices(r, shared + 4 * lane());
  if (synced) sync_warp();
  shared[lane() ^ 4] = r[0];
}

KERNEL(copied, const u8* from) {
  copy_async(shared_memory() + 16 * lane(), from, true);
  copies_commit();
  copies_wait<0>();
  if (synced) sync_warp();
  out[lane()] = shared_memory()[16 * (31 - lane())];
}

KERNEL(copied_over, const u8* from) {
  out[lane()] = shared_memory()[16 * (31 - lane())];
  if (synced) sync_warp();
  copy_async(shared_memory() + 16 * lane(), from, true);
  copies_commit();
  copies_wait<0>();
}
"""
NAMES = ("handed_over", "of_another_warp", "loaded", "copied", "copied_over")


@pytest.fixture(scope="module")
def kernels() -> Program:
    return program.build(KERNELS, NAMES, races=True)


def launch(kernels: Program, name: str, synced: int, **order: bool) -> None:
    out = np.zeros(64, np.uint32)
    more = [np.zeros(16, np.uint8)] if name.startswith("copied") else []
    threads = 64 if name in NAMES[:2] else 32
    kernels.launch(
        name, grid=2, threads=threads, shared_bytes=1024, args=[out, synced, *more], **order
    )


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("name", "orders", "races"),
    [
        ("handed_over", (1, 2), (0, 3)),  # `any` orders no memory
        ("of_another_warp", (2,), (0, 1)),
        ("loaded", (1,), (0,)),
        ("copied", (1,), (0,)),
        ("copied_over", (1,), (0,)),
    ],
)
def test_what_no_barrier_orders_is_found(
    kernels: Program,
    name: str,
    orders: tuple[int, ...],
    races: tuple[int, ...],
    late: bool,
    backward: bool,
) -> None:
    for synced in orders:
        launch(kernels, name, synced, late=late, backward=backward)
    for synced in races:
        with pytest.raises(EmulationError, match=rf"^{name}: race: a .* of byte \d+ of shared mem"):
            launch(kernels, name, synced, late=late, backward=backward)


def test_a_race_is_told_with_its_lines(kernels: Program) -> None:
    begin = KERNELS.splitlines().index("KERNEL(handed_over) {") + 1
    lines = rf"thread \d+ at kernel\.cu:{begin + 6}, \d+ at kernel\.cu:{begin + 2}$"
    with pytest.raises(EmulationError, match=f"a read and a write of .*, {lines}"):
        launch(kernels, "handed_over", 0)


SHAPE: dict[str, Any] = {"heads": 6, "kv_heads": 2, "dim": 128}
RAGGED: dict[str, Any] = {"lengths": (1, 300, 17, 40), "queries": (1, 7, 1, 2)}


@pytest.mark.parametrize("window", [None, 21])
@pytest.mark.parametrize("codec", formats.TYPES)
def test_decode_has_no_races(codec: str, window: int | None) -> None:
    """Several chunks and their merge, in a window results without; rows that see less."""
    dtype = torch.bfloat16 if codec == "bf16" else torch.float32
    scene = build(Geometry(codec, **SHAPE, **RAGGED, dtype=dtype), stored_queries=True)
    with pytest.MonkeyPatch.context() as patch:
        emulated.emulate(patch, races=True)
        scoring = Scoring(scene.scale, window=window)
        out = decode.decode(scene.q, *scene.caches, scene.batch(), TIER, scoring)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("codec", ["q4_0", "nvfp4", "iso3"])
@pytest.mark.parametrize(("heads", "dim"), [(4, 128), (16, 128), (4, 256)])
def test_decode_has_no_races_at_other_shapes(codec: str, heads: int, dim: int) -> None:
    shape = Geometry(codec, heads=heads, kv_heads=1, dim=dim, lengths=(270, 33), page_tokens=32)
    scene = build(shape, stored_queries=True)
    with pytest.MonkeyPatch.context() as patch:
        emulated.emulate(patch, races=True)
        out = decode.decode(scene.q, *scene.caches, scene.batch(), TIER, Scoring(scene.scale))
    assert torch.isfinite(out).all()
