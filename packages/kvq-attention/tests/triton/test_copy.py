"""The Triton kernel that copies whole pages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kvq_attention import TensorError, launches, ops
from kvq_attention.triton import copy as kernel
from kvq_attention.triton.copy import Layout
from kvq_codecs import Encoded

from ..layouts import LAYOUTS, sparse
from ..scene import assert_same_bytes, poisoned
from .cases import each_codec, each_device, on_cpu

PAGES = 9
# Pairs with −1 or an id that the cache does not have are skipped; one page may go to several.
SOURCES, TARGETS = [1, -1, 8, 8, 2, PAGES, 3, -7], [4, 5, 0, 7, -1, 6, 2**40, 6]


def noise(
    codec: str, heads: int = 2, dim: int = 128, page_tokens: int = 16, device: str = "cpu"
) -> Encoded:
    """A cache of random bytes."""
    random = np.random.default_rng(heads)
    cache = poisoned(codec, PAGES, heads, page_tokens, dim, "cpu")
    for plane in cache.planes.values():
        raw = plane.numpy().view(np.uint8)
        raw[...] = random.integers(0, 256, raw.shape, np.uint8)
    return cache.map(lambda plane: plane.to(device))


def ids(pages: list[int], device: str) -> torch.Tensor:
    return torch.tensor(pages, dtype=torch.int64, device=device)


def expected(cache: Encoded) -> Encoded:
    """What a cache holds after copying, by NumPy."""
    host = cache.map(lambda plane: torch.from_numpy(plane.cpu().numpy().copy()))
    for plane in host.planes.values():
        for source, target in zip(SOURCES, TARGETS, strict=True):
            if 0 <= source < PAGES and 0 <= target < PAGES:
                plane.numpy()[target] = plane.numpy()[source]
    return host


def check(caches: list[Encoded], device: str) -> None:
    wanted = [expected(cache) for cache in caches]
    kernel.copy_pages(caches, ids(SOURCES, device), ids(TARGETS, device))
    for got, copy in zip(caches, wanted, strict=True):
        assert_same_bytes(got, copy)


@pytest.mark.proves("triton.copy_pages.plain")
@each_codec
@each_device
def test_triton_copies_pages(codec: str, device: str) -> None:
    cache = noise(codec, device=device)
    wanted = expected(cache)
    with launches.counting() as launched:
        ops.copy_pages([cache], ids(SOURCES, device), ids(TARGETS, device), backend="triton")
    assert launched["triton"]["copy_pages"] == 1
    assert_same_bytes(cache, wanted)


@each_device
def test_k_and_v_of_many_layers_share_launches(device: str) -> None:
    caches = [noise(c, device=device) for c in ["q4_0", "iso3"] * 7] + [noise("fp32", 3)]
    caches[-1] = caches[-1].map(lambda plane: plane.to(device))
    check(caches, device)
    # 7 × (codes, scale) and 7 × (low, high, scale), the scales of both codecs apart
    assert len(list(kernel.launches_of(caches[:-1]))) == 5 * 3  # 4 + 2 + 1 of each kind


@each_device
def test_any_page_size_and_number_of_heads(device: str) -> None:
    for page_tokens, heads, dim in ((1, 1, 128), (5, 3, 96), (128, 8, 128), (16, 1, 256)):
        check([noise("q8_0", heads, dim, page_tokens, device)], device)


@pytest.mark.parametrize("layout", LAYOUTS)
@each_device
def test_p122_p124_the_layout_of_a_cache_does_not_matter(layout: str, device: str) -> None:
    for codec in ("q6_0", "nvfp4", "bf16"):
        moved = LAYOUTS[layout]((noise(codec, 2, device=device), noise("fp8", 3, device=device)))
        check(list(moved), device)


@each_device
def test_ids_may_be_columns(device: str) -> None:
    cache = noise("fp8", device=device)
    wanted = expected(cache)
    pairs = torch.stack([ids(SOURCES, device), ids(TARGETS, device)], dim=1)
    kernel.copy_pages([cache], pairs[:, 0], pairs[:, 1])
    assert_same_bytes(cache, wanted)


@each_device
def test_nothing_is_launched_for_no_pairs(device: str) -> None:
    with launches.counting() as launched:
        ops.copy_pages([noise("fp8", device=device)], *[ids([], device)] * 2, backend="triton")
    assert launched["triton"]["copy_pages"] == 0


@pytest.mark.parametrize("device", [on_cpu])
def test_f51_pages_beyond_two_to_the_31_bytes(device: str, tmp_path: Path) -> None:
    page_tokens, dim = 128, 128
    pages = 2**32 // (page_tokens * dim) + 2
    cache = sparse("q8_0", dim, (pages, 1, page_tokens), tmp_path, "k")
    small = noise("q8_0", 1, dim, page_tokens)
    for name, plane in cache.planes.items():
        plane.numpy()[pages - 1] = small.planes[name].numpy()[0]
    middle = pages // 2 + 1
    kernel.copy_pages([cache], ids([pages - 1], device), ids([middle], device))
    kernel.copy_pages([cache], ids([middle], device), ids([0], device))
    for name, plane in cache.planes.items():
        for page in (0, middle):
            assert plane.numpy()[page].tobytes() == small.planes[name].numpy()[0].tobytes()


def test_axes_that_lie_one_after_the_other_are_one() -> None:
    compact = torch.empty(PAGES, 4, 16, 64, dtype=torch.uint8)
    assert Layout.of(compact) == Layout(8, 512, (1, 1, 512), (0, 0))
    scales = torch.empty(PAGES, 4, 16, 1)
    assert Layout.of(scales) == Layout(8, 32, (1, 1, 32), (0, 0))
    tokens_first = torch.empty(PAGES, 16, 4, 64, dtype=torch.uint8).transpose(1, 2)
    assert Layout.of(tokens_first) == Layout(8, 512, (4, 16, 8), (8, 32))
    padded = torch.empty(PAGES, 4, 18, 64, dtype=torch.uint8)[:, :, :16]
    assert Layout.of(padded) == Layout(8, 576, (1, 4, 128), (0, 144))
    one_head = torch.empty(PAGES, 3, 16, 64, dtype=torch.uint8)[:, 1:2]
    assert Layout.of(one_head) == Layout(8, 384, (1, 1, 128), (0, 0))


def test_words_are_as_wide_as_every_address_allows() -> None:
    def word_bytes(row: int, offset: int) -> int:
        raw = torch.empty(offset + 4 * row * 16, dtype=torch.uint8)
        return Layout.of(raw[offset:].view(4, 1, 16, row)[..., : row - 8]).word_bytes

    assert [word_bytes(72, offset) for offset in (0, 8, 4, 2, 1)] == [8, 8, 4, 2, 1]
    assert [word_bytes(row, 0) for row in (72, 76, 74, 73)] == [8, 4, 2, 1]


def test_rows_whose_items_lie_apart_are_refused() -> None:
    apart = noise("fp8").map(lambda plane: plane.repeat_interleave(2, dim=3)[..., ::2])
    with pytest.raises(TensorError, match=r"plane 'codes' of caches\[0\].* their stride is 2"):
        kernel.copy_pages([apart], ids([0], "cpu"), ids([1], "cpu"))
