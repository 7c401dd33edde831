"""Prompts cut into chunks, and rows of other magnitudes than 1: what went wrong elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import kvq_codecs
from kvq_attention import ops
from kvq_attention.claims import TRITON_HEAD_DIMS
from kvq_codecs.measure import gaussian_rows, measure

from ..decode.cases import ieee
from ..decode.places import INTERPRETED, KINDS, TRITON, Place
from ..scene import TIER, Scene, assert_same_bytes
from ..tolerances import KERNEL, PACKED_PAST
from .cases import check_output, cut, extend, piece, scene_of

pytestmark = ieee

REFERENCE = replace(
    INTERPRETED, backend="reference", codecs=kvq_codecs.names(), dims=TRITON_HEAD_DIMS, marks=()
)


def each_kind(kinds: tuple[str, ...]) -> pytest.MarkDecorator:
    """Every codec by the reference and on a GPU, some in the interpreter, which is slow."""
    return pytest.mark.parametrize(
        ("codec", "place"),
        [
            pytest.param(codec, place, marks=place.marks, id=f"{codec}-{place}")
            for place in (REFERENCE, INTERPRETED, TRITON)
            for codec in (kinds if place == INTERPRETED else place.codecs)
        ],
    )


def prompt_of(place: Place, codec: str, length: int) -> Scene:
    """One request, all of whose tokens are to be computed; always the same."""
    shape = {"heads": 2, "kv_heads": 1, "dim": 128, "lengths": (length,), "queries": (length,)}
    return scene_of(place, codec, **shape)


def stored(place: Place, step: Scene) -> None:
    """Write a step's rows into their slots."""
    slots = step.batch().tables[TIER].slot_mapping
    ops.store(*step.fresh(), *step.caches, slots, backend=place.backend)


def near(out: torch.Tensor, whole: torch.Tensor, codec: str) -> bool:
    """Whether nothing but what a codec loses of the past lies between them."""
    error = float((out.double() - whole.double()).norm() / whole.double().norm())
    lost = measure(kvq_codecs.get(codec), gaussian_rows()).relative_rms
    return error <= PACKED_PAST * lost + KERNEL[out.dtype]


@each_kind(KINDS)
def test_p036_a_prompt_in_chunks_is_the_prompt_in_one(codec: str, place: Place) -> None:
    """An fp8 cache made chunked prefills fail; here every format and size of a chunk."""
    length, alone = (24, 20) if place == INTERPRETED else (90, 50)
    if place == TRITON:
        length, alone = 1100, 1090
    whole = prompt_of(place, codec, length)
    wanted = extend(place, whole)
    stored(place, whole)
    for size in (1, 7, 16, 17, 512):
        scene, outs = prompt_of(place, codec, length), []
        ends = list(range(size, length, size))
        if size == 1:  # one at a time is slow: not those at the beginning
            ends = list(range(alone, length))
        for start, stop in zip((0, *ends), (*ends, length), strict=True):
            step = piece(scene, start, stop)
            outs.append(extend(place, step))
            stored(place, step)
        assert near(torch.cat(outs), wanted, codec), f"in chunks of {size}"
        for cache, other in zip(scene.caches, whole.caches, strict=True):
            assert_same_bytes(cache, other)


@each_kind(KINDS)
def test_p040_a_prefix_hit_has_the_scales_of_the_prefix(codec: str, place: Place) -> None:
    """Reads of a cached prefix left the scales out: the first request was right, later ones not."""
    for k_gain, v_gain in ((50.0, 8.0), (0.125, 0.02)):
        scene = prompt_of(place, codec, 60)
        scene.ks[0].mul_(k_gain)
        scene.vs[0].mul_(v_gain)
        scoring = {"scale": scene.scale / k_gain}
        fresh = extend(place, scene, **scoring)
        stored(place, scene)
        hit = cut(scene, 50)
        out = extend(place, hit, **scoring)
        check_output(hit, out, **scoring)
        assert near(out, fresh[50:], codec)
