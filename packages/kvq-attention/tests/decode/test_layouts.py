"""Caches in any memory layout, at any address: the bits are those of a compact cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ..scene import Geometry, Scene, build
from .cases import (
    attend,
    each_codec,
    each_device,
    each_kind,
    ieee,
    in_interpreter,
    judge,
    refill,
)
from .layouts import LAYOUTS, Caches, one_block, page_of_everything, sparse, tokens_first

pytestmark = ieee


def scene_of(codec: str, device: str, v: str | None = None, kv_heads: int = 2) -> Scene:
    geometry = Geometry(
        codec,
        v,
        heads=kv_heads,
        kv_heads=kv_heads,
        dim=128,
        lengths=(1, 60),
        queries=(1, 2),
    )
    return build(geometry, device, stored_queries=True, seed=5)


def in_caches(scene: Scene, caches: Caches, pages: list[list[int]] | None = None) -> Scene:
    """The same requests in other caches, which hold their rows, or in other pages of those."""
    wanted = scene.pages if pages is None else pages
    return Scene(scene.geometry, scene.ks, scene.vs, scene.qs, wanted, *caches)


@pytest.mark.parametrize("layout", LAYOUTS)
@each_kind
@each_device
def test_the_layout_of_a_cache_does_not_matter(codec: str, layout: str, device: str) -> None:
    scene = scene_of(codec, device)
    moved = in_caches(scene, LAYOUTS[layout](scene.caches))
    assert torch.equal(attend(moved), attend(scene))


@pytest.mark.parametrize("kv_heads", [4, 16])
@each_device
def test_p030_heads_first_and_tokens_first_are_told_apart(kv_heads: int, device: str) -> None:
    """As many heads as a page has tokens, and 4: only strides tell the layouts apart."""
    shape = Geometry("fp8", heads=kv_heads, kv_heads=kv_heads, lengths=(20,))
    scene = build(shape, device, stored_queries=True)
    out = attend(scene)
    judge(out, scene.expected(fresh=False), torch.float32)
    assert torch.equal(attend(in_caches(scene, tokens_first(scene.caches))), out)
    k_first = tokens_first(scene.caches)[0], scene.v_cache
    assert torch.equal(attend(in_caches(scene, k_first)), out), "K and V need not agree"


@pytest.mark.parametrize(("k", "v"), [("fp8", "fp8"), ("nvfp4", "nvfp4"), ("q8_0", "iso3")])
@each_device
def test_p122_views_into_a_larger_block(k: str, v: str, device: str) -> None:
    """K of all pages, then V, from a storage offset on."""
    scene = scene_of(k, device, v)
    moved = in_caches(scene, one_block(scene.caches))
    judge(attend(moved), scene.expected(fresh=False), torch.float32)


@pytest.mark.parametrize("layer", [0, 2])
@each_kind
@each_device
def test_p124_layers_packed_into_one_block(codec: str, layer: int, device: str) -> None:
    scene = scene_of(codec, device)
    moved = in_caches(scene, page_of_everything(scene.caches, layer=layer))
    assert torch.equal(attend(moved), attend(scene))


@each_codec
@in_interpreter
def test_f51_rows_on_both_sides_of_two_gigabytes(codec: str, device: str, tmp_path: Path) -> None:
    """Every code plane has items past 2³¹; pages lie below and above that edge, and at the end.

    The planes are files of zeros that no disk space is taken for until a page is written.
    """
    scene = scene_of(codec, device, kv_heads=1)
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
    assert torch.equal(attend(far), attend(scene))


@each_kind
@in_interpreter
def test_p120_a_verify_step_at_the_top_of_a_large_pool(
    codec: str, device: str, tmp_path: Path
) -> None:
    """Seven query tokens after a long prefix, in pages whose first byte lies past 2³¹."""
    geometry = Geometry(
        codec, heads=2, kv_heads=1, dim=128, lengths=(140,), queries=7, dtype=torch.bfloat16
    )
    scene = build(geometry, device, stored_queries=True)
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
    judge(attend(far), scene.expected(fresh=False), torch.bfloat16)
