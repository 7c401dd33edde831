"""A chunk is read as it came, its past as it is stored, wherever a prefill is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvq_attention import ops

from ..decode.cases import ieee, judge
from ..decode.places import INTERPRETED, KINDS, TRITONS, Place, each_codec, each_place
from ..oracle import attention, relative_error
from ..scene import TIER, Scene, put
from ..tolerances import KERNEL, REORDERED
from .cases import check_output, cut, extend, scene_of

pytestmark = ieee


def prefilled(place: Place, codec: str, length: int, **shape: Any) -> Scene:
    """One request all of whose tokens are the step's; its slots hold poison."""
    return scene_of(place, codec, lengths=(length,), queries=(length,), **shape)


def stored(scene: Scene) -> None:
    """Write the step's rows into their slots."""
    slots = scene.batch().tables[TIER].slot_mapping
    ops.store(*scene.fresh(), *scene.caches, slots, backend="reference")


@each_codec(places=TRITONS)
def test_f21_a_chunk_never_reads_its_own_quantization(codec: str, place: Place) -> None:
    scene = prefilled(place, codec, 90, dim=128)
    (q,), (k,), (v,) = scene.qs, scene.ks, scene.vs
    exact = attention(q, k, v, scale=scene.scale)
    first = extend(place, scene)
    judge(first, exact, scene.geometry.dtype)

    # What its slots hold does not matter: poison before, its own quantization now.
    stored(scene)
    assert torch.equal(extend(place, scene), first)

    # A second chunk reads the first packed and itself as it came.
    second = cut(scene, 70)
    check_output(second, extend(place, second))
    if codec not in ("fp32", "fp16"):
        lost = relative_error(second.expected(fresh=True), exact[70:])
        assert lost > KERNEL[scene.geometry.dtype], "the past was not packed"


@pytest.mark.parametrize("scoring", [{}, {"window": 40}], ids=["plain", "window"])
@each_place(TRITONS)
def test_a_lossless_cache_gives_the_same_at_every_cut(
    scoring: dict[str, Any], place: Place
) -> None:
    scene = prefilled(place, "fp32", 150, heads=6)
    whole = extend(place, scene, **scoring)
    stored(scene)
    for start in (1, 16, 17, 149):
        rest = extend(place, cut(scene, start), **scoring)
        assert relative_error(rest, whole[start:]) <= REORDERED


@each_codec(KINDS, TRITONS)
def test_p010_a_prefix_hit_gives_the_bits_of_a_cold_run_that_was_cut_there(
    codec: str, place: Place
) -> None:
    """Its pages were written by another request, and lie elsewhere."""
    cold = prefilled(place, codec, 90, dim=128)
    stored(cold)
    other = scene_of(place, codec, dim=128, lengths=(33, 90), queries=(33, 26), seed=1)
    for cache, rows in zip(other.caches, (cold.ks[0], cold.vs[0]), strict=True):
        put(cache, rows[:64], other.slots(1, 0, 64))
    for theirs, ours in ((other.ks, cold.ks), (other.vs, cold.vs), (other.qs, cold.qs)):
        theirs[1] = ours[0] if theirs is not other.qs else ours[0][64:]
    assert torch.equal(extend(place, other)[33:], extend(place, cut(cold, 64)))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@each_place(TRITONS)
def test_what_slots_of_the_step_hold_is_harmless(bad: float, place: Place) -> None:
    scene = scene_of(place, "bf16", dim=128)
    clean = extend(place, scene)
    for r, (length, count) in enumerate(
        zip(scene.geometry.lengths, scene.geometry.counts, strict=True)
    ):
        for cache in scene.caches:
            put(cache, torch.full((count, 2, 128), bad), scene.slots(r, length - count, length))
    assert torch.equal(extend(place, scene), clean)


@each_place([INTERPRETED])
def test_a_nan_row_of_a_request_stays_in_it(place: Place) -> None:
    """A token of the chunk, and one of the past."""
    scene = scene_of(place, "q8_0", dim=128, lengths=(30, 40, 20), queries=(9, 9, 20))
    clean = extend(place, scene)
    scene.ks[0][25] = scene.vs[0][25] = torch.nan
    put(scene.v_cache, torch.full((1, 2, 128), torch.nan), scene.slots(1, 3, 4))
    out = extend(place, scene)
    assert torch.equal(out[18:], clean[18:])
    assert out[4:9].isnan().all() and out[9:18].isnan().all(), "what is seen must not be hidden"
