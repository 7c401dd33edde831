"""Caches in any memory layout, at any address: the bits are those of a compact cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvq_attention import AttentionError

from ..layouts import LAYOUTS, Caches, one_block, page_of_everything, sparse, tokens_first
from ..scene import Scene
from .cases import check_output, ieee, refill
from .places import CUDAS, KINDS, ON_CPU, TRITONS, Place, each_codec, each_place

pytestmark = ieee

DENSE = ("one_block", "page_of_everything")  # the rows of a page and head are neighbours
SPREAD = tuple(name for name in LAYOUTS if name not in DENSE)


def scene_of(codec: str, place: Place, v: str | None = None, kv_heads: int = 2) -> Scene:
    shape = {"heads": kv_heads, "kv_heads": kv_heads, "lengths": (1, 60), "queries": (1, 2)}
    return place.scene(codec, v, dim=128, **shape, seed=5)


def in_caches(scene: Scene, caches: Caches, pages: list[list[int]] | None = None) -> Scene:
    """The same requests in other caches, which hold their rows, or in other pages of those."""
    wanted = scene.pages if pages is None else pages
    return Scene(scene.geometry, scene.ks, scene.vs, scene.qs, wanted, *caches)


@pytest.mark.parametrize("layout", DENSE)
@each_codec(KINDS)
def test_the_layout_of_a_cache_does_not_matter(codec: str, layout: str, place: Place) -> None:
    scene = scene_of(codec, place)
    moved = in_caches(scene, LAYOUTS[layout](scene.caches))
    assert torch.equal(place.attend(moved), place.attend(scene))


@pytest.mark.parametrize("layout", SPREAD)
@each_codec(KINDS, TRITONS)
def test_rows_of_a_page_need_not_be_neighbours(codec: str, layout: str, place: Place) -> None:
    scene = scene_of(codec, place)
    moved = in_caches(scene, LAYOUTS[layout](scene.caches))
    assert torch.equal(place.attend(moved), place.attend(scene))


@pytest.mark.parametrize("layout", SPREAD)
@pytest.mark.parametrize("side", [0, 1], ids=["K", "V"])
@each_codec(KINDS, CUDAS)
def test_cuda_refuses_rows_that_are_not_neighbours(
    codec: str, side: int, layout: str, place: Place
) -> None:
    scene = scene_of(codec, place)
    moved = list(scene.caches)
    moved[side] = LAYOUTS[layout](scene.caches)[side]
    plane = next(iter(scene.k_cache.planes))
    said = f"plane '{plane}' of a {codec} cache: the rows of a page must .*; triton reads such a"
    with pytest.raises(AttentionError, match=said):
        place.attend(in_caches(scene, (moved[0], moved[1])))


@pytest.mark.parametrize("bytes_off", [1, 2, 4, 8])
@each_codec(KINDS, CUDAS)
def test_cuda_refuses_planes_between_multiples_of_16_bytes(
    codec: str, bytes_off: int, place: Place
) -> None:
    scene = scene_of(codec, place)

    def shift(plane: torch.Tensor) -> torch.Tensor:
        items = -(-bytes_off // plane.itemsize)
        block = torch.cat([plane.new_zeros(items), plane.flatten()])
        return block[items:].view(plane.shape)

    moved = scene.k_cache, scene.v_cache.map(shift)
    with pytest.raises(AttentionError, match=r"must be multiples of 16; triton reads such a"):
        place.attend(in_caches(scene, moved))


@each_codec(KINDS, CUDAS)
def test_cuda_takes_pages_of_one_token_apart(codec: str, place: Place) -> None:
    """The strides of heads and pages may be any multiples of 16 bytes."""
    scene = scene_of(codec, place)

    def spread(plane: torch.Tensor) -> torch.Tensor:
        pages, heads, tokens, row = plane.shape
        more = 48 // plane.itemsize
        block = plane.new_zeros(pages, (heads + 1) * (tokens * row + more))
        shape, strides = plane.shape, (block.stride(0), tokens * row + more, row, 1)
        view = block.as_strided(shape, strides)
        return view.copy_(plane)

    k, v = (cache.map(spread) for cache in scene.caches)
    assert torch.equal(place.attend(in_caches(scene, (k, v))), place.attend(scene))


@pytest.mark.parametrize("kv_heads", [4, 16])
@each_place(TRITONS)
def test_p030_heads_first_and_tokens_first_are_told_apart(kv_heads: int, place: Place) -> None:
    """As many heads as a page has tokens, and 4: only strides tell the layouts apart."""
    scene = place.scene("fp8", heads=kv_heads, kv_heads=kv_heads, lengths=(20,))
    out = place.attend(scene)
    check_output(scene, out)
    assert torch.equal(place.attend(in_caches(scene, tokens_first(scene.caches))), out)
    k_first = tokens_first(scene.caches)[0], scene.v_cache
    assert torch.equal(place.attend(in_caches(scene, k_first)), out), "K and V need not agree"


@pytest.mark.parametrize(("k", "v"), [("fp8", "fp8"), ("nvfp4", "nvfp4"), ("q8_0", "iso3")])
@each_place()
def test_p122_views_into_a_larger_block(k: str, v: str, place: Place) -> None:
    """K of all pages, then V, from a storage offset on."""
    scene = scene_of(k, place, v)
    moved = in_caches(scene, one_block(scene.caches))
    check_output(scene, place.attend(moved))


@pytest.mark.parametrize("layer", [0, 2])
@each_codec(KINDS)
def test_p124_layers_packed_into_one_block(codec: str, layer: int, place: Place) -> None:
    scene = scene_of(codec, place)
    moved = in_caches(scene, page_of_everything(scene.caches, layer=layer))
    assert torch.equal(place.attend(moved), place.attend(scene))


@each_codec(places=ON_CPU)
def test_f51_rows_on_both_sides_of_two_gigabytes(codec: str, place: Place, tmp_path: Path) -> None:
    """Every code plane has items past 2³¹; pages lie below and above that edge, and at the end.

    The planes are files of zeros that no disk space is taken for until a page is written.
    """
    scene = scene_of(codec, place, kv_heads=1)
    codes = [p for p in scene.k_cache.planes.values() if p.shape[-1] >= 16]
    page_items = min(plane[0].numel() for plane in codes)
    edge = 2**31 // page_items
    lead = (edge + edge // 8, 1, 16)
    pages = [[edge - 1], [edge, lead[0] - 1, 0, edge // 2]]
    caches = sparse(codec, 128, lead, tmp_path, "k"), sparse(codec, 128, lead, tmp_path, "v")
    assert all(
        plane.numel() > 2**31 for plane in caches[0].planes.values() if plane.shape[-1] >= 16
    )
    far = in_caches(scene, caches, pages)
    refill(far)
    assert torch.equal(place.attend(far), place.attend(scene))


@each_codec(KINDS, ON_CPU)
def test_p120_a_verify_step_at_the_top_of_a_large_pool(
    codec: str, place: Place, tmp_path: Path
) -> None:
    """Seven query tokens after a long prefix, in pages whose first byte lies past 2³¹."""
    shape = {"heads": 2, "kv_heads": 1, "dim": 128, "lengths": (140,), "queries": 7}
    scene = place.scene(codec, **shape, dtype=torch.bfloat16)
    page_bytes = min(
        plane[0].numel() * plane.itemsize
        for plane in scene.k_cache.planes.values()
        if plane.shape[-1] >= 16
    )
    num_pages = 2**31 // page_bytes + 20
    lead = (num_pages, 1, 16)
    caches = sparse(codec, 128, lead, tmp_path, "k"), sparse(codec, 128, lead, tmp_path, "v")
    far = in_caches(scene, caches, [list(range(num_pages - 9, num_pages))])
    refill(far)
    check_output(scene, place.attend(far))
