"""The decode kernels on CPU tensors: their own text, compiled by g++ and run by the emulator."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from kvq_attention.cuda import decode, shapes

from .emulator.program import SOURCE, build

RESIDENT = 3  # blocks at once: few, so that each has several pieces
MERGING = 32  # warps of merges at once: few, so that small batches have all kinds of them
# Of items.py; set to one number, they make chunks of as many tokens.
CHUNK_SIZES = ("ALONE", "CHUNK_STEP", "SMALLEST_CHUNK", "LARGEST_CHUNK")
ORDER = {"late": True, "backward": False}  # see emulator/program.py


def load(
    k: str,
    v: str,
    dim: int,
    dtype: torch.dtype,
    shape: shapes.Shape,
    softcap: bool,
    one_tile: bool,
    device: torch.device,
    races: bool = False,
) -> decode.Kernels:
    """What `decode.load` returns on a GPU; a merge is compiled when it is launched.

    races: look for them, see emulator/program.py.
    """
    given = decode.defines(k, v, dim, dtype, shape, softcap, one_tile)
    step = build((SOURCE / "decode.cu").read_text(), ["decode"], defines=given, races=races)
    merges = tuple(
        decode.Merge(
            Merge(decode.merge_defines(v, dim, dtype, shape.rows, warps), races),
            warps * shapes.WARP,
            decode.merge_shared_bytes(dim, warps),
            MERGING // warps,
        )
        for warps in decode.MERGE_WARPS
    )
    return decode.Kernels(
        step.function("decode", **ORDER), merges, given["SET_SHARED_BYTES"], RESIDENT
    )


@dataclass(frozen=True)
class Merge:
    """A merge with these defines: most calls that tests make need none."""

    defines: dict[str, Any]
    races: bool = False

    def launch_beside(self, *args: Any) -> None:
        """Compile and launch it."""
        text = (SOURCE / "merge.cu").read_text()
        made = build(text, ["merge"], defines=self.defines, races=self.races)
        made.function("merge", **ORDER).launch(*args)


def picked(k: str, v: str, dim: int, rows: int, device: torch.device) -> shapes.Shape:
    """What `decode.picked` returns on an H200."""
    return shapes.pick(decode.sizes(k, v, dim), rows, 228 << 10)


def emulate(patch: pytest.MonkeyPatch, races: bool = False) -> None:
    """Run decode's kernels on the CPU from here on."""
    patch.setattr(decode, "load", partial(load, races=races))
    patch.setattr(decode, "picked", picked)


def rows_at_once(likely: int) -> int:
    """Query rows that a block takes where a request has so many."""
    return picked("q8_0", "q8_0", 128, likely, torch.device("cpu")).rows


Way = tuple[str, str, int, torch.dtype, int, bool]


def prepare(ways: Iterable[Way]) -> None:
    """Compile for codecs of K and V, head_dim, dtype, query rows, soft cap: all cores at once."""

    def one(way: Way) -> None:
        k, v, dim, dtype, rows, softcap = way
        device = torch.device("cpu")
        load(k, v, dim, dtype, picked(k, v, dim, rows, device), softcap, True, device)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(one, ways):
            pass
