"""Stores into caches in any memory layout, at any address, from sources of any pitch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvq_codecs
from kvq_attention.triton import store as kernel

from ..decode.cases import ieee
from ..layouts import LAYOUTS, Caches, one_block, page_of_everything, sparse, tokens_first
from ..scene import poisoned, put
from .cases import each_codec, each_device, on_cpu
from .stored import check, pair

pytestmark = ieee

PAIRS = [("fp8", "fp8"), ("nvfp4", "nvfp4"), ("q8_0", "iso3"), ("bf16", "q6_0")]


@pytest.mark.parametrize("layout", LAYOUTS)
@each_codec
@each_device
def test_the_layout_of_a_cache_does_not_matter(codec: str, layout: str, device: str) -> None:
    check(*pair(9, 2, 128), (codec, "q4_0"), device, place=LAYOUTS[layout])


@pytest.mark.parametrize("heads", [4, 8, 16])
@each_device
def test_p030_heads_first_and_tokens_first_are_told_apart(heads: int, device: str) -> None:
    """As many heads as a page has tokens, and 4 and 8: only strides tell the layouts apart."""
    for page_tokens in {heads, 16}:
        k, v = pair(5, heads, 64)
        args = k, v, ("fp8", "q4_0"), device
        check(*args, page_tokens=page_tokens, store=kernel.store)
        check(*args, page_tokens=page_tokens, store=kernel.store, place=tokens_first)

        def only_k(caches: Caches) -> Caches:
            return tokens_first(caches)[0], caches[1]

        check(*args, page_tokens=page_tokens, store=kernel.store, place=only_k)


@pytest.mark.parametrize("codecs", PAIRS)
@each_device
def test_p122_views_into_a_larger_block(codecs: tuple[str, str], device: str) -> None:
    """K of all pages, then V, from a storage offset on; the rest of the block keeps its bytes."""
    check(*pair(9, 2, 128), codecs, device, place=one_block)


@pytest.mark.parametrize("codecs", PAIRS)
@each_device
def test_p124_a_layers_view_strides_inside_a_shared_block(
    codecs: tuple[str, str], device: str
) -> None:
    kept: list[torch.Tensor] = []

    def middle_layer(caches: Caches) -> Caches:
        views = page_of_everything(caches, layers=3, layer=1)
        plane = next(iter(views[0].planes.values()))
        raw = torch.empty(0, dtype=torch.uint8, device=device).set_(plane.untyped_storage())
        kept.append(raw.view(plane.shape[0], 3, -1))
        return views

    check(*pair(9, 2, 128), codecs, device, place=middle_layer)
    assert (kept[0][:, [0, 2]] == 0xFF).all(), "other layers are as they were"


@pytest.mark.parametrize("codec", ["q8_0", "nvfp4", "iso4"])
@each_device
def test_planes_at_odd_addresses_are_written_in_smaller_words(codec: str, device: str) -> None:
    """No row of a byte plane begins at a multiple of anything."""

    def odd(plane: torch.Tensor) -> torch.Tensor:
        pages, heads, tokens, items = plane.shape
        size = pages * heads * tokens * (items + 1) + 1
        raw = torch.full((size * plane.itemsize,), 0xFF, dtype=torch.uint8, device=device)
        whole = raw.view(plane.dtype)[1:].view(pages, heads, tokens, items + 1)
        return whole[..., :items]

    def place(caches: Caches) -> Caches:
        k, v = (cache.map(odd) for cache in caches)
        return k, v

    check(*pair(9, 2, 128), (codec, codec), device, place=place)


@pytest.mark.parametrize("device", [on_cpu])
@pytest.mark.parametrize("codec", ["fp32", "q4_0", "fp8", "iso3"])
def test_f51_slots_around_two_to_the_31_bytes(codec: str, device: str, tmp_path: Path) -> None:
    """Pages just below and above the limits of 32-bit items and bytes; files hold only those."""
    spec, dim, heads, page_tokens = kvq_codecs.get(codec).spec, 128, 1, 128
    largest = max(plane.row_bytes(dim) for plane in spec.planes)
    page_bytes = largest * heads * page_tokens
    pages = 2**32 // page_bytes + 2
    caches = [sparse(codec, dim, (pages, heads, page_tokens), tmp_path, tag) for tag in "kv"]
    edges = [2**31 // page_bytes, 2**32 // page_bytes]
    wanted = [0, *(edge + step for edge in edges for step in (-1, 0, 1))]
    k, v = pair(len(wanted), heads, dim)
    slots = torch.tensor([page * page_tokens + 77 for page in wanted])
    kernel.store(k, v, *caches, slots)
    for got, given in zip(caches, (k, v), strict=True):
        small = poisoned(codec, len(wanted), heads, page_tokens, dim, device)
        put(small, given, [i * page_tokens + 77 for i in range(len(wanted))])
        for name, plane in small.planes.items():
            held = got.planes[name].numpy()[wanted, :, 77]
            assert held.tobytes() == plane.numpy()[:, :, 77].tobytes(), name


@pytest.mark.parametrize("device", [on_cpu])
def test_f51_sources_of_a_huge_pitch(device: str, tmp_path: Path) -> None:
    """Tokens, or heads, two of which lie more than 2³¹ items apart; a file holds only those."""
    step, path = (1 << 30) + 64, tmp_path / "source"
    with path.open("wb") as file:
        file.truncate(2 * (2 * step + 8192))
    block = torch.from_numpy(np.memmap(path, np.float16, "r+"))
    k = block.as_strided((3, 3, 64), (step, 128, 1))
    v = block.as_strided((3, 3, 64), (512, step, 1), 4096)
    given = [x.half() for x in pair(3, 3, 64)]
    for source, values in zip((k, v), given, strict=True):
        source.copy_(values)

    def store(_k: torch.Tensor, _v: torch.Tensor, *rest: Any) -> None:
        kernel.store(k, v, *rest)

    check(*given, ("q8_0", "q4_0"), device, store=store)


@pytest.mark.parametrize("device", [on_cpu])
def test_f51_more_slots_than_32_bits_count(device: str, tmp_path: Path) -> None:
    codec, dim, page_tokens = "nvfp4", 16, 128
    lead = 2**31 // page_tokens + 2, 1, page_tokens
    caches = [sparse(codec, dim, lead, tmp_path, tag) for tag in "kv"]
    given = pair(3, 1, dim)
    slots = [5, 2**31 - 1, 2**31 + page_tokens + 3]
    kernel.store(*given, *caches, torch.tensor(slots))
    for got, rows in zip(caches, given, strict=True):
        encoded = kvq_codecs.get(codec).encode(rows.numpy())
        page, offset = np.divmod(slots, page_tokens)
        for name, plane in got.planes.items():
            held = plane.numpy()[page, :, offset]
            assert held.tobytes() == encoded.planes[name].tobytes(), name
