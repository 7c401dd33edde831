"""Stores and copies of real sizes on a GPU: the oracle's bytes, also replayed by a graph."""

from __future__ import annotations

import pytest
import torch

import kvq_codecs
from kvq_attention import ops
from kvq_codecs import Encoded

from .. import big
from ..scene import V_GAIN, assert_same_bytes
from .cases import BACKEND, compiled, each_codec

pytestmark = [pytest.mark.gpu, compiled]

TOKENS, HEADS, DIM, PAGE_TOKENS = 16384, 8, 128, 16
PAGES = TOKENS // PAGE_TOKENS + 16


def fused(dtype: torch.dtype, tokens: int = TOKENS, seed: int = 0) -> list[torch.Tensor]:
    """K and V as slices of a model's fused qkv tensor; V is larger."""
    random = torch.Generator("cuda").manual_seed(seed)
    width = HEADS * DIM
    qkv = big.normal(random, dtype, tokens, 6 * width)
    qkv[:, 5 * width :] *= V_GAIN
    return [qkv[:, i * width : (i + 1) * width].unflatten(1, (HEADS, DIM)) for i in (4, 5)]


def some_slots(tokens: int = TOKENS, seed: int = 0) -> torch.Tensor:
    """Pages in no order, every 97th token padding."""
    random = torch.Generator("cuda").manual_seed(seed)
    order = torch.randperm(PAGES, generator=random, device="cuda")
    position = torch.arange(tokens, device="cuda")
    slots = order[position // PAGE_TOKENS] * PAGE_TOKENS + position % PAGE_TOKENS
    return torch.where(position % 97 == 5, -1, slots)


def empty(codec: str) -> Encoded:
    return big.empty(codec, PAGES, HEADS, PAGE_TOKENS, DIM)


def by_oracle(codec: str, rows: torch.Tensor, slots: torch.Tensor) -> Encoded:
    """A cache that holds rows, encoded by the oracle on the CPU."""
    cache, kept = empty(codec), slots >= 0
    encoded = kvq_codecs.get(codec).encode(rows[kept].cpu())
    for name, plane in cache.planes.items():
        items = big.as_integers(encoded.planes[name]).cuda()
        big.as_integers(plane)[slots[kept] // PAGE_TOKENS, :, slots[kept] % PAGE_TOKENS] = items
    return cache


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@each_codec
def test_a_long_prefill(codec: str, dtype: torch.dtype) -> None:
    k, v = fused(dtype)
    slots, caches = some_slots(), (empty(codec), empty(codec))
    ops.store(k, v, *caches, slots, backend=BACKEND)
    for got, rows in zip(caches, (k, v), strict=True):
        assert_same_bytes(got, by_oracle(codec, rows, slots))


@pytest.mark.parametrize("codecs", [("q8_0", "q4_0"), ("fp8", "iso3"), ("nvfp4", "bf16")])
def test_a_captured_store_reads_rows_and_slots_when_it_is_replayed(
    codecs: tuple[str, str],
) -> None:
    tokens = 33
    k, v = (x.contiguous() for x in fused(torch.bfloat16, tokens))
    slots, caches = some_slots(tokens), [empty(codec) for codec in codecs]
    ops.store(k, v, *caches, slots, backend=BACKEND)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.store(k, v, *caches, slots, backend=BACKEND)
    for seed in (1, 2):
        for held, fresh in zip((k, v), fused(torch.bfloat16, tokens, seed), strict=True):
            held.copy_(fresh)
        slots.copy_(some_slots(tokens, seed))
        for cache in caches:
            for plane in cache.planes.values():
                plane.view(torch.uint8).fill_(0xFF)
        graph.replay()
        for got, codec, rows in zip(caches, codecs, (k, v), strict=True):
            assert_same_bytes(got, by_oracle(codec, rows, slots))


@each_codec
def test_copies_of_many_pages(codec: str) -> None:
    k, v = fused(torch.bfloat16)
    caches = [empty(codec), empty(codec)]
    ops.store(k, v, *caches, some_slots(), backend=BACKEND)
    order = torch.randperm(PAGES, device="cuda")
    source, target = order[: PAGES // 2], order[PAGES // 2 : PAGES // 2 * 2]
    wanted = [cache.map(torch.clone) for cache in caches]
    for cache in wanted:
        for plane in map(big.as_integers, cache.planes.values()):
            plane[target] = plane[source]
    ops.copy_pages(caches, source, target, backend=BACKEND)
    for got, copy in zip(caches, wanted, strict=True):
        assert_same_bytes(got, copy)
