"""Where a prompt that reads everything packed is cut into steps changes no bit of a decode.

Not of any decode: long requests are cut into chunks whose size follows their length. Batches for
which the cut must not matter say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvq_attention import Scoring, UnsupportedError
from kvq_attention.cuda import backend as cuda
from kvq_attention.triton import tiles

from .. import big
from ..scene import TIER, Geometry, Scene
from .cases import check_output, ieee
from .places import (
    CUDA,
    EMULATED,
    INTERPRETED,
    KINDS,
    TRITON,
    TRITONS,
    Place,
    each_codec,
    each_place,
)

pytestmark = ieee

LENGTH = 35
WINDOW = {"window": 21, "softcap": 3.0}


def part(scene: Scene, start: int, stop: int) -> Scene:
    """The only request of a scene when tokens [start, stop) are its step."""
    shape = replace(scene.geometry, lengths=(stop,), queries=(stop - start,))
    first = scene.geometry.lengths[0] - scene.geometry.counts[0]
    return replace(scene, geometry=shape, qs=[scene.qs[0][start - first : stop - first]])


def outputs(place: Place, scene: Scene, ends: Sequence[int], **scoring: Any) -> torch.Tensor:
    """The output of a prompt's tokens from where its queries begin, in steps that end there."""
    first = scene.geometry.lengths[0] - scene.geometry.counts[0]
    outs = []
    for start, stop in zip((first, *ends), ends, strict=False):
        step = part(scene, start, stop)
        batch = replace(step.batch(), any_cut=True)
        outs.append(place.attend(step, batch=batch, **scoring))
    return torch.cat(outs)


def ends(first: int, length: int, size: int) -> list[int]:
    """Of steps of so many tokens."""
    return [*range(first + size, length, size), length]


@pytest.mark.parametrize(
    ("codec", "scoring"), [("q4_0", {}), *((codec, WINDOW) for codec in KINDS)], ids=str
)
@each_place(TRITONS)
def test_a_query_has_the_same_bits_wherever_its_prompt_is_cut(
    codec: str, scoring: dict[str, Any], place: Place
) -> None:
    shape: dict[str, Any] = {"heads": 3, "kv_heads": 1, "dim": 128}
    scene = place.scene(codec, lengths=(LENGTH,), queries=LENGTH, **shape)
    whole = place.attend(scene, **scoring)
    for size in (1, 7, 16, 17):
        starts = range(0, LENGTH, size)
        parts = [part(scene, start, min(start + size, LENGTH)) for start in starts]
        outs = [place.attend(each, **scoring) for each in parts]
        assert torch.equal(torch.cat(outs), whole), f"in steps of {size}"


# Chunks of 16 tokens, of which the last has what is left of 4; an edge lies among the queries
CHUNK, MOST = 16, 4
FIRST, LONG = 27, 50


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiles.Config(tokens=16, warps=1, stages=2, programs=8)
    monkeypatch.setattr(tiles, "pick", lambda *_, **__: config)
    monkeypatch.setattr(tiles, "FIXED_CHUNK", CHUNK)
    monkeypatch.setattr(tiles, "FIXED_CHUNKS", MOST)


@pytest.mark.parametrize(
    ("codec", "scoring"), [("q4_0", {}), ("nvfp4", {"window": 20}), ("iso3", WINDOW)], ids=str
)
@each_place([INTERPRETED])
def test_no_cut_changes_a_bit_of_a_prompt_of_several_chunks(
    short_chunks: None, codec: str, scoring: dict[str, Any], place: Place
) -> None:
    """Nor that a window hides what chunks begin with; steps of one token are those at an edge."""
    shape: dict[str, Any] = {"heads": 1, "kv_heads": 1, "dim": 128}
    scene = place.scene(codec, lengths=(LONG,), queries=LONG - FIRST, **shape)
    if codec == "iso3":
        scoring = {**scoring, "sinks": torch.tensor([0.5], device=place.device)}
    whole = outputs(place, scene, [LONG], **scoring)
    check_output(scene, whole, **scoring)
    for steps in (ends(FIRST, LONG, 7), ends(FIRST, LONG, 17), [31, 32, 33, 49, LONG]):
        cut = outputs(place, scene, steps, **scoring)
        assert torch.equal(cut, whole), f"in steps that end at {steps}"


@each_place([INTERPRETED])
def test_the_last_of_the_most_chunks_has_what_is_left(short_chunks: None, place: Place) -> None:
    shape: dict[str, Any] = {"heads": 1, "kv_heads": 1}
    length = CHUNK * MOST + 20
    scene = place.scene("q8_0", lengths=(length,), queries=25, **shape)
    whole = outputs(place, scene, [length])
    check_output(scene, whole)
    assert torch.equal(outputs(place, scene, ends(length - 25, length, 17)), whole)


@each_place([INTERPRETED])
def test_other_decodes_of_several_chunks_depend_on_the_cut(place: Place) -> None:
    """So that the tests above say something."""
    shape: dict[str, Any] = {"heads": 1, "kv_heads": 1, "dim": 128}
    scene = place.scene("q4_0", lengths=(150,), queries=30, **shape)
    with place.chunks_of(32, 2):  # of 96 tokens, and of 64
        whole, cut = place.attend(scene), place.attend(part(scene, 120, 125))
    assert not torch.equal(cut, whole[:5])


@each_place([INTERPRETED])
def test_the_company_of_such_a_prompt_changes_no_bit(short_chunks: None, place: Place) -> None:
    shape: dict[str, Any] = {"heads": 2, "kv_heads": 1, "dim": 64}
    scene = place.scene("q8_0", lengths=(40, 3, 60), queries=(5, 1, 9), **shape)
    scoring = {"window": 30}
    together = place.attend(scene, batch=replace(scene.batch(), any_cut=True), **scoring)
    check_output(scene, together, **scoring)
    for r, rows in enumerate(together.split((5, 1, 9))):
        batch = replace(scene.batch(r), any_cut=True)
        assert torch.equal(place.attend(scene, r, batch=batch, **scoring), rows)


@pytest.mark.parametrize("scoring", [{}, {"window": 4200}], ids=str)
@each_codec(KINDS, [TRITON])
def test_no_cut_changes_a_bit_of_5000_tokens(
    codec: str, scoring: dict[str, Any], place: Place
) -> None:
    """The compiled kernels, with chunks as they are."""
    shape = {"heads": 8, "kv_heads": 2, "dim": 128, "dtype": torch.bfloat16}
    scene = big.build(Geometry(codec, **shape, lengths=(5000,), queries=1000), 5)
    assert 4000 < tiles.FIXED_CHUNK < 5000, "an edge lies among the queries"
    scoring = {**scoring, "sinks": torch.linspace(-2, 3, 8, device=place.device)}
    whole = outputs(place, scene, [5000], **scoring)
    for size in (7, 16, 17, 512):
        cut = outputs(place, scene, ends(4000, 5000, size), **scoring)
        assert torch.equal(cut, whole), f"in steps of {size}"
    some = list(range(4090, 4100))
    cut = outputs(place, scene, [*some, *range(4960, 5001)], **scoring)
    assert torch.equal(cut, whole), "one at a time"


@pytest.mark.parametrize("codec", ["q4_0", "iso3"])
def test_no_cut_changes_a_bit_of_the_reference(codec: str) -> None:
    reference = replace(INTERPRETED, backend="reference", marks=())
    shape: dict[str, Any] = {"heads": 3, "kv_heads": 1, "dim": 128}
    scene = reference.scene(codec, lengths=(5000,), queries=40, **shape)
    for scoring in ({}, {"window": 1100}):
        whole = outputs(reference, scene, [5000], **scoring)
        for size in (1, 7, 16, 17):
            cut = outputs(reference, scene, ends(4960, 5000, size), **scoring)
            assert torch.equal(cut, whole), f"in steps of {size}"


@each_place([EMULATED, CUDA])
def test_kernels_that_cut_by_length_refuse_such_a_batch(place: Place) -> None:
    """By name; `auto` would take the next, and count that it did."""
    scene = place.scene("q8_0", lengths=(40,), queries=3)
    batch = replace(scene.batch(), any_cut=True)
    given = scene.q, *scene.caches, batch, TIER, Scoring(scene.scale)
    said = "cuda cuts a request into chunks by its length"
    assert said in str(cuda.refusal(*given))
    assert cuda.refusal(*given[:3], scene.batch(), *given[4:]) is None
    with pytest.raises(UnsupportedError, match=said):
        place.attend(scene, batch=batch)
