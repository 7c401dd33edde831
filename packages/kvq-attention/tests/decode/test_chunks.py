"""Where a sequence is cut into chunks: their edges, several of them, more than there may be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvq_attention import Batch
from kvq_attention.cuda import decode as cuda_decode
from kvq_attention.triton import decode as triton_decode

from ..scene import TIER, Scene
from .cases import check_output, ieee, poison_new_tensors, with_table
from .places import KINDS, ON_CPU, Place, each_codec, each_place

pytestmark = ieee

# Chunks so short that an interpreter gets through several; a request is cut into 4 at most.
SHORT, MOST = 32, 4
EDGES = (31, 32, 33, 65)
TOO_LONG = (128, 129, 200)  # 4 chunks of 32, then longer ones


def scene_of(codec: str, place: Place, lengths: tuple[int, ...], **shape: Any) -> Scene:
    wanted = {"heads": 1, "kv_heads": 1, "dim": 128, **shape}
    return place.scene(codec, lengths=lengths, **wanted, seed=9)


def cut(
    place: Place, scene: Scene, tokens: int = SHORT, most: int = MOST, **given: Any
) -> torch.Tensor:
    """The output where a sequence is cut into such chunks."""
    with place.chunks_of(tokens, most):
        return place.attend(scene, **given)


@each_codec(KINDS, ON_CPU)
def test_lengths_at_the_edges_of_chunks(codec: str, place: Place) -> None:
    scene = scene_of(codec, place, EDGES)
    check_output(scene, cut(place, scene))


@each_place(ON_CPU)
def test_more_chunks_than_there_may_be_become_longer_ones(place: Place) -> None:
    scene = scene_of("q8_0", place, TOO_LONG)
    check_output(scene, cut(place, scene))


@pytest.mark.parametrize("window", [1, 31, 32, 33, 70])
@each_place(ON_CPU)
def test_windows_at_the_edges_of_chunks(window: int, place: Place) -> None:
    """A window moves where the first chunk begins; its queries straddle chunks."""
    scene = scene_of("q8_0", place, (66, 140), queries=(4, 1))
    scoring = {"window": window, "sinks": torch.tensor([0.5], device=place.device)}
    check_output(scene, cut(place, scene, **scoring), **scoring)


@each_place(ON_CPU)
def test_chunks_that_a_query_does_not_see(place: Place) -> None:
    """The last chunk holds nothing that the first queries of the step see."""
    scene = scene_of("fp8", place, (40, 66), queries=(12, 5))
    check_output(scene, cut(place, scene))


@each_codec(KINDS, ON_CPU)
def test_f49_scratch_full_of_nan_changes_nothing(
    codec: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = scene_of(codec, place, (20, 50), heads=2, queries=(1, 2))
    clean = cut(place, scene)
    check_output(scene, clean)
    with monkeypatch.context() as patched:
        made = poison_new_tensors(patched)
        assert torch.equal(cut(place, scene), clean)
    assert len(made) >= 3, "the output and both scratch tensors come unwritten"


@each_place(ON_CPU)
def test_a_missing_page_of_one_chunk_spoils_its_request(place: Place) -> None:
    scene = scene_of("q4_0", place, (20, 70, 100), queries=(1, 2, 1))
    clean, batch = cut(place, scene), scene.batch()
    for column in range(5):
        page_table = batch.tables[TIER].page_table.clone()
        page_table[1, column] = -1
        out = cut(place, scene, batch=with_table(batch, page_table))
        # the last position is seen by the second query alone, and lies in the last page alone
        assert out[2].isnan().all()
        assert column == 4 or out[1].isnan().all()
        out[1:3] = clean[1:3]
        assert torch.equal(out, clean)


@each_place(ON_CPU)
def test_the_cut_moves_an_output_by_rounding_at_most(place: Place) -> None:
    scene = scene_of("q4_0", place, (300,))
    for tokens in (32, 128, 512):  # 10 chunks, 3, 1
        check_output(scene, cut(place, scene, tokens, most=64))


@each_place(ON_CPU)
def test_the_chunks_of_a_launch_as_it_is_picked(place: Place) -> None:
    """One token less and one more than a chunk of the usual size, and than two."""
    chunk = place.chunk
    scene = scene_of("q8_0", place, (chunk - 1, chunk + 1, 2 * chunk + 1))
    check_output(scene, place.attend(scene))


def of_usual(scene: Scene, usual: int | None, only: int | None = None) -> Batch:
    return replace(scene.batch(only), usual_requests=usual)


@each_place(ON_CPU)
def test_requests_are_cut_by_how_many_calls_usually_have(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by how many this one has."""
    for launcher in (cuda_decode, triton_decode):  # a CPU has none that chunks could fill
        monkeypatch.setattr(launcher, "processors", lambda _: 132)
    scene = scene_of("q8_0", place, (place.chunk + 40, 2 * place.chunk), kv_heads=2, heads=2)
    outputs = {}
    for usual in (None, 1, 10**6):
        outputs[usual] = place.attend(scene, batch=of_usual(scene, usual))
        check_output(scene, outputs[usual])
        alone = place.attend(scene, only=1, batch=of_usual(scene, usual, 1))
        assert torch.equal(alone, outputs[usual][1:])
    assert not torch.equal(outputs[1], outputs[10**6])
    assert torch.equal(outputs[1], outputs[None]), "either way, more than there can be are wanted"
