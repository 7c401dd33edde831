"""NaN: what must not be read is full of it, and where it is read it shows, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvq_codecs

from ..scene import Scene, put
from .cases import DTYPES, FULL, PACKED, check_output, ieee, refill
from .places import INTERPRETED, Place, each_codec, each_place

pytestmark = ieee

# Two requests, one with a past of several pages; for tests about what a request must not see.
TWO, QUERIES = (9, 70), (1, 2)
LONG = 1


def scene_of(codec: str, place: Place, **shape: Any) -> Scene:
    """Few rows, as each costs an interpreter milliseconds; one shape, as a GPU compiles each."""
    wanted = {"heads": 1, "kv_heads": 1, "dim": 128, "lengths": (70,), **shape}
    return place.scene(codec, **wanted, seed=7)


@each_codec()
def test_p022_recycled_pages_of_other_bytes_never_leak(codec: str, place: Place) -> None:
    """Unused slots, the last pages' rests and unused pages hold NaN scales and NaN codes."""
    scene, window = scene_of(codec, place, lengths=TWO, queries=QUERIES), 20
    clean = place.attend(scene, window=window)
    check_output(scene, clean, window=window)
    for poison in (0xFF, 0x7F):
        for cache in scene.caches:
            for plane in cache.planes.values():
                plane.view(torch.uint8).fill_(poison)
        for r, length in enumerate(TWO):
            for cache, rows in zip(scene.caches, (scene.ks[r], scene.vs[r]), strict=True):
                # what the window has left behind is another request's by now
                first = max(0, length - QUERIES[r] + 1 - window)
                put(cache, rows[first:], scene.slots(r, first, length))
        assert torch.equal(place.attend(scene, window=window), clean)


@each_codec()
def test_a_nan_row_is_seen_where_it_is_and_nowhere_else(codec: str, place: Place) -> None:
    """A key of head 0 and a value of head 1 are NaN; head 2 and the other request are as ever."""
    scene = scene_of(codec, place, heads=3, kv_heads=3, lengths=TWO)
    clean = place.attend(scene)
    (slot,) = scene.slots(LONG, 23, 24)
    for head, (cache, rows) in enumerate(zip(scene.caches, (scene.ks, scene.vs), strict=True)):
        row = rows[LONG][23].clone()
        row[head] = torch.nan
        put(cache, row[None], [slot])
    out = place.attend(scene)
    assert out[LONG, :2].isnan().all(), "what is seen must not be hidden"
    out[LONG, :2] = clean[LONG, :2]
    assert torch.equal(out, clean)


# Values of other formats are NaN themselves, and 0 · NaN is NaN: there a NaN row spoils its own
# request.
@each_codec(PACKED)
def test_a_nan_row_of_a_later_token_does_not_reach_earlier_queries(
    codec: str, place: Place
) -> None:
    scene = scene_of(codec, place, lengths=(70,), queries=(2,))
    clean = place.attend(scene)
    for cache in scene.caches:
        put(cache, torch.full((1, 1, 128), torch.nan), scene.slots(0, 69, 70))
    out = place.attend(scene)
    assert torch.equal(out[0], clean[0])
    assert out[1].isnan().all()


@each_codec(FULL)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_an_infinite_value_is_seen_too(codec: str, value: float, place: Place) -> None:
    scene = scene_of(codec, place)
    clean = place.attend(scene)
    scene.vs[0][23, 0, 5] = value
    refill(scene)
    out = place.attend(scene)
    assert not torch.isfinite(out[0, 0, 5])
    out[0, 0, 5] = clean[0, 0, 5]
    assert torch.equal(out, clean)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_place()
def test_a_nan_query_spoils_its_own_row_only(dtype: torch.dtype, place: Place) -> None:
    scene = scene_of("q8_0", place, heads=2, lengths=TWO, queries=QUERIES, dtype=dtype)
    clean, q = place.attend(scene), scene.q.clone()
    q[2, 1, 3] = torch.nan
    out = place.attend(scene, q=q)
    assert out[2, 1].isnan().all()
    out[2, 1] = clean[2, 1]
    assert torch.equal(out, clean)


def test_the_poison_is_nan_where_a_codec_can_say_so() -> None:
    for codec in PACKED:
        scene = scene_of(codec, INTERPRETED, lengths=(1,), queries=1)
        assert kvq_codecs.get(codec).decode(scene.k_cache.map(lambda plane: plane[0])).isnan().all()
