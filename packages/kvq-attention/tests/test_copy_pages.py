"""`copy_pages`: whole pages of any number of caches, by the reference and as an op."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvq_codecs
from kvq_attention import AttentionError, DeviceError, SlotError, TensorError, launches, ops
from kvq_codecs import Encoded

from . import invented
from .scene import assert_same_bytes, poisoned

ON = "cuda" if torch.cuda.is_available() else "cpu"  # where the interpreter stands for the GPU
PAGES, PAGE_TOKENS = 7, 16


def noise(
    codec: str,
    heads: int,
    dim: int,
    device: str = "cpu",
    pad: int = 0,
    page_tokens: int = PAGE_TOKENS,
) -> Encoded:
    """A cache of random bytes."""
    random = torch.Generator().manual_seed(heads)
    cache = poisoned(codec, PAGES, heads, page_tokens, dim, device, pad)
    for plane in cache.planes.values():
        raw = torch.randint(0, 256, (*plane.shape, plane.itemsize), generator=random)
        plane.copy_(raw.to(device, torch.uint8).view(plane.dtype).squeeze(-1))
    return cache


def some_caches(device: str = "cpu") -> list[Encoded]:
    """Every codec, heads and rows of several sizes, padded planes among them."""
    kinds = enumerate(kvq_codecs.names())
    return [noise(codec, 1 + i % 3, 128 * (1 + i % 2), device, pad=i % 2) for i, codec in kinds]


def ids(*pages: int, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(pages, dtype=torch.int64, device=device)


def copy_and_check(caches: list[Encoded], backend: str, device: str) -> None:
    """One page to two; pairs with −1 on either side are skipped."""
    wanted = [cache.map(torch.clone) for cache in caches]
    for cache in wanted:
        for plane in cache.planes.values():
            host = plane.cpu().numpy().copy()
            host[5], host[0] = host[2], host[2]
            plane.copy_(torch.from_numpy(host))
    source, target = ids(2, -1, 2, 3, device=device), ids(5, 1, 0, -1, device=device)
    with launches.counting() as launched:
        ops.copy_pages(caches, source, target, backend=backend)
    assert launched[backend]["copy_pages"] == 1
    for cache, copy in zip(caches, wanted, strict=True):
        assert_same_bytes(cache, copy)


@pytest.mark.proves("reference.copy_pages.plain")
def test_copy_pages_copies_every_plane(device: str) -> None:
    copy_and_check(some_caches(device), "reference", device)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("page_tokens", [1, 5])
def test_bytes_of_any_codec_and_page_size_are_copied(page_tokens: int, backend: str) -> None:
    kvq_codecs.register(invented.CODEC)
    try:
        caches = [
            noise(name, 2, dim, ON, pad, page_tokens)
            for name, dim, pad in ((invented.SPEC.name, 48, 0), ("fp8", 40, 1), ("q6_0", 32, 0))
        ]
        copy_and_check(caches, backend, ON)
    finally:
        kvq_codecs.unregister(invented.SPEC.name)


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        ((0, 7), (1, 2), r"pages \[7\] must lie in \[0, 7\)"),
        ((0, -2), (1, 2), r"pages \[-2\] must lie in \[0, 7\)"),
        ((0, 1), (2, 2), r"written once and none is a source, got \[0, 1\] → \[2, 2\]"),
        ((0, 1), (1, 2), r"written once and none is a source, got \[0, 1\] → \[1, 2\]"),
    ],
)
def test_pages_that_cannot_be_copied_are_refused_before_any_is_written(
    source: tuple[int, ...], target: tuple[int, ...], said: str
) -> None:
    caches = some_caches()
    before = [cache.map(torch.clone) for cache in caches]
    with pytest.raises(SlotError, match=said):
        ops.copy_pages(caches, ids(*source), ids(*target), backend="reference")
    for cache, copy in zip(caches, before, strict=True):
        assert_same_bytes(cache, copy)


def test_nothing_to_copy_launches_nothing() -> None:
    caches = some_caches()
    with launches.counting() as launched:
        ops.copy_pages(caches, ids(), ids())
        ops.copy_pages(caches, ids(-1, 3), ids(2, -1))
    assert not any(n for counted in launched.values() for n in counted.values())


WRONG: list[tuple[dict[str, Any], type[AttentionError], str]] = [
    ({"caches": []}, TensorError, r"at least one kvq_codecs.Encoded, got \[\]"),
    ({"caches": noise("q8_0", 1, 128)}, TensorError, "a sequence of at least one .*, got Encoded"),
    ({"caches": [torch.zeros(1)]}, TensorError, r"caches\[0\] must be a kvq_codecs.Encoded"),
    (
        {"caches": [noise("q8_0", 1, 128), poisoned("q8_0", 3, 1, 16, 128, "cpu")]},
        TensorError,
        r"axis 0 of caches\[1\] .* is P = 3, but caches\[0\] has P = 7",
    ),
    ({"source_pages": torch.zeros(1).int()}, TensorError, "source_pages must be torch.int64"),
    ({"target_pages": ids(1, 2)}, TensorError, r"target_pages \[2\] is M = 2, but source_pages"),
    ({"target_pages": ids(1).to("meta")}, DeviceError, "target_pages on meta"),
    ({"backend": "turbo"}, AttentionError, "unknown attention backend 'turbo'"),
]


@pytest.mark.parametrize(("change", "error", "said"), WRONG, ids=range(len(WRONG)))
def test_what_does_not_fit_is_named(
    change: dict[str, Any], error: type[AttentionError], said: str
) -> None:
    right: dict[str, Any] = {
        "caches": some_caches(),
        "source_pages": ids(0),
        "target_pages": ids(1),
    }
    with pytest.raises(error, match=said):
        ops.copy_pages(**{**right, **change})
