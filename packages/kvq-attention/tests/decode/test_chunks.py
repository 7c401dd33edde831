"""Where a sequence is cut into chunks: their edges, several of them, more than there may be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvq_attention import Scoring
from kvq_attention.triton import tiles
from kvq_attention.triton.decode import launch

from ..scene import TIER, Geometry, Scene, build
from .cases import (
    attend,
    each_kind,
    ieee,
    in_interpreter,
    judge,
    poison_new_tensors,
)

pytestmark = ieee

# Chunks so short that the interpreter gets through several; a request is cut into 4 at most.
SHORT = tiles.Config(tokens=16, warps=1, stages=2, programs=8, chunk=32, max_chunks=4)
EDGES = (31, 32, 33, 65)
TOO_LONG = (128, 129, 200)  # 4 chunks of 32, then longer ones


def scene_of(codec: str, device: str, lengths: tuple[int, ...], **shape: Any) -> Scene:
    wanted = {"heads": 1, "kv_heads": 1, "dim": 128, **shape}
    geometry = Geometry(codec, lengths=lengths, **wanted)
    return build(geometry, device, stored_queries=True, seed=9)


def cut(scene: Scene, config: tiles.Config = SHORT, **scoring: Any) -> torch.Tensor:
    given = Scoring(**{"scale": scene.scale, **scoring})
    return launch(scene.q, *scene.caches, scene.batch(), TIER, given, config)


@each_kind
@in_interpreter
def test_lengths_at_the_edges_of_chunks(codec: str, device: str) -> None:
    scene = scene_of(codec, device, EDGES)
    judge(cut(scene), scene.expected(fresh=False), torch.float32)


@in_interpreter
def test_more_chunks_than_there_may_be_become_longer_ones(device: str) -> None:
    scene = scene_of("q8_0", device, TOO_LONG)
    judge(cut(scene), scene.expected(fresh=False), torch.float32)


@pytest.mark.parametrize("window", [1, 31, 32, 33, 70])
@in_interpreter
def test_windows_at_the_edges_of_chunks(window: int, device: str) -> None:
    """A window moves where the first chunk begins; its queries straddle chunks."""
    scene = scene_of("q8_0", device, (66, 140), queries=(4, 1))
    scoring = {"window": window, "sinks": torch.tensor([0.5], device=device)}
    judge(cut(scene, **scoring), scene.expected(fresh=False, **scoring), torch.float32)


@in_interpreter
def test_chunks_that_a_query_does_not_see(device: str) -> None:
    """The last chunk holds nothing that the first queries of the step see."""
    scene = scene_of("fp8", device, (40, 66), queries=(12, 5))
    judge(cut(scene), scene.expected(fresh=False), torch.float32)


@each_kind
@in_interpreter
def test_f49_scratch_full_of_nan_changes_nothing(
    codec: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = scene_of(codec, device, (20, 50), heads=3, queries=(1, 2))
    clean = cut(scene)
    judge(clean, scene.expected(fresh=False), torch.float32)
    with monkeypatch.context() as patched:
        made = poison_new_tensors(patched)
        assert torch.equal(cut(scene), clean)
    assert len(made) >= 3, "the output and both scratch tensors come unwritten"


@in_interpreter
def test_the_cut_moves_an_output_by_rounding_at_most(device: str) -> None:
    scene = scene_of("q4_0", device, (300,))
    expected = scene.expected(fresh=False)
    for tokens, chunk in ((16, 16), (32, 64), (128, 512)):  # 19 chunks, 5, 1
        config = tiles.Config(tokens=tokens, warps=1, stages=2, programs=8, chunk=chunk)
        judge(cut(scene, config), expected, torch.float32)


@in_interpreter
def test_the_chunks_of_a_launch_as_it_is_picked(device: str) -> None:
    """One token less and one more than a chunk of the usual size, and than two."""
    chunk = tiles.CHUNK
    scene = scene_of("q8_0", device, (chunk - 1, chunk + 1, 2 * chunk + 1))
    judge(attend(scene), scene.expected(fresh=False), torch.float32)
