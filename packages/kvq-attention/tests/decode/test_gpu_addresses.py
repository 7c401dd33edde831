"""Slots beyond 2³¹ bytes: a pool of more than 20 GiB of which a few pages are touched."""

from __future__ import annotations

import math

import pytest
import torch

import kvq_codecs
from kvq_attention import Batch, Table, ops
from kvq_codecs import Encoded

from .. import big
from ..layouts import ALIGNED
from ..scene import TIER, assert_same_bytes
from .cases import judge
from .places import ON_GPU, Place, each_codec

POOL_BYTES = 21 << 30
HEADS, KV_HEADS, DIM, PAGE_TOKENS, LENGTH, QUERIES = 32, 8, 128, 16, 333, 7
NEEDED = -(-LENGTH // PAGE_TOKENS)


def pool(codec: str) -> tuple[Encoded, Encoded]:
    """K of all pages, then V, in one block that nothing has written; skipped where it cannot be."""
    free, _ = torch.cuda.mem_get_info()
    if free < POOL_BYTES + (4 << 30):
        pytest.skip(f"needs {POOL_BYTES + (4 << 30):,} free bytes on the GPU, there are {free:,}")
    spec = kvq_codecs.get(codec).spec
    pages = POOL_BYTES // (2 * KV_HEADS * PAGE_TOKENS * spec.row_bytes(DIM))
    shapes = {p.name: (pages, KV_HEADS, PAGE_TOKENS, p.row_items(DIM)) for p in spec.planes}
    block = torch.empty(POOL_BYTES + 16 * ALIGNED, dtype=torch.uint8, device="cuda")
    start = 0
    caches = []
    for _ in "kv":
        planes = {}
        for plane in spec.planes:
            dtype = getattr(torch, plane.dtype)
            size = math.prod(shapes[plane.name]) * dtype.itemsize
            planes[plane.name] = block[start : start + size].view(dtype).view(shapes[plane.name])
            start += -(-size // ALIGNED) * ALIGNED
        caches.append(Encoded(spec, DIM, planes))
    return caches[0], caches[1]


def page_lists(caches: tuple[Encoded, Encoded]) -> dict[str, list[int]]:
    """Where a request may lie: at the start, at 2³¹ bytes and items of each plane, at the end."""
    pages = caches[0].lead[0]
    edges = set()
    for cache in caches:
        for plane in cache.planes.values():
            items = plane[0].numel()
            edges |= {2**31 // items, 2**31 // (items * plane.itemsize), 2**32 // items}
    inside = sorted(edge for edge in edges if NEEDED < edge < pages - 2 * NEEDED)
    lists = {"start": list(range(NEEDED)), "end": list(range(pages - NEEDED, pages))}
    for edge in inside:
        lists[f"edge {edge}"] = list(range(edge - NEEDED // 2, edge - NEEDED // 2 + NEEDED))
    return lists


def batch_of(pages: list[int]) -> Batch:
    position = torch.arange(LENGTH - QUERIES, LENGTH, device="cuda")
    table = torch.tensor([pages], dtype=torch.int32, device="cuda")
    slots = table[0].long()[position // PAGE_TOKENS] * PAGE_TOKENS + position % PAGE_TOKENS
    return Batch(
        torch.tensor([0, QUERIES], dtype=torch.int32, device="cuda"),
        torch.tensor([LENGTH], dtype=torch.int32, device="cuda"),
        {TIER: Table(table, slots)},
        PAGE_TOKENS,
    )


def part(cache: Encoded, pages: list[int]) -> Encoded:
    """A copy of some pages."""
    where = torch.tensor(pages, device="cuda")
    return cache.map(lambda x: big.as_integers(x).index_select(0, where).view(x.dtype))


@each_codec(["fp32", "bf16", "q8_0", "q4_0", "nvfp4", "iso3"], ON_GPU)
def test_f51_p120_slots_at_the_end_of_a_large_pool(codec: str, place: Place) -> None:
    """Store, a verify step of seven queries, and copies: the bits of the pool's first pages."""
    caches = pool(codec)
    random = torch.Generator("cuda").manual_seed(len(codec))
    k, v = (big.normal(random, torch.bfloat16, LENGTH, KV_HEADS, DIM) for _ in range(2))
    q = big.normal(random, torch.bfloat16, QUERIES, HEADS, DIM)
    position = torch.arange(LENGTH, device="cuda")

    def fill(pages: list[int]) -> None:
        page = torch.tensor(pages, device="cuda")[position // PAGE_TOKENS]
        ops.store(k, v, *caches, page * PAGE_TOKENS + position % PAGE_TOKENS, backend="triton")

    def attended(pages: list[int]) -> torch.Tensor:
        batch = batch_of(pages)
        return ops.decode(q, *caches, batch, TIER, scale=DIM**-0.5, backend=place.backend)

    lists = page_lists(caches)
    assert any(plane.numel() * plane.itemsize > 2**32 for plane in caches[0].planes.values())
    assert len(lists) >= 3, "some plane is longer than 2³¹ bytes"
    start = lists.pop("start")
    for cache in caches:
        for plane in cache.planes.values():
            plane[:NEEDED].view(torch.uint8).zero_()
    fill(start)
    low = attended(start)
    stored = [big.read(cache, LENGTH, start) for cache in caches]
    judge(low, big.oracle.attention(q, *stored, scale=DIM**-0.5, device="cuda"), torch.bfloat16)
    whole = [part(cache, start) for cache in caches]
    for name, pages in lists.items():
        for cache in caches:
            for plane in cache.planes.values():
                big.as_integers(plane)[pages] = 0
        fill(pages)
        assert torch.equal(attended(pages), low), name
        for cache, wanted in zip(caches, whole, strict=True):
            assert_same_bytes(part(cache, pages), wanted)
            for plane in cache.planes.values():
                big.as_integers(plane)[pages] = 0
        # the same by copying: from the first pages there, and back from there
        ids = [torch.tensor(x, device="cuda") for x in (start, pages)]
        ops.copy_pages(caches, *ids, backend="triton")
        assert torch.equal(attended(pages), low), name
        for cache in caches:
            for plane in cache.planes.values():
                plane[:NEEDED].view(torch.uint8).zero_()
        ops.copy_pages(caches, *reversed(ids), backend="triton")
        assert torch.equal(attended(start), low), name
