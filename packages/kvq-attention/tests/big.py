"""Caches of real sizes, filled and judged on the GPU: codecs and float64 attention run there."""

from __future__ import annotations

from typing import Any

import torch

import kvq_codecs
from kvq_codecs import Encoded

from . import oracle
from .decode.cases import judge
from .scene import V_GAIN, Geometry, Scene

CUDA = "cuda"


def build(geometry: Geometry, seed: int) -> Scene:
    """A scene whose caches hold every token; it keeps no raw K and V."""
    g = geometry
    random = torch.Generator(CUDA).manual_seed(seed)
    sizes = [-(-length // g.page_tokens) for length in g.lengths]
    ids = torch.randperm(1 + sum(sizes), generator=random, device=CUDA)
    pages = [part.tolist() for part in ids[1:].split(sizes)]
    caches = [
        empty(codec, len(ids), g.kv_heads, g.page_tokens, dim)
        for codec, dim in zip(g.codecs, g.dims, strict=True)
    ]
    qs = [normal(random, g.dtype, n, g.heads, g.dim) for n in g.counts]
    scene = Scene(g, [], [], qs, pages, *caches)
    for r, length in enumerate(g.lengths):
        for cache, gain in zip(caches, (1.0, V_GAIN), strict=True):
            put(
                cache, gain * normal(random, torch.float32, length, g.kv_heads, cache.dim), pages[r]
            )
    return scene


def normal(random: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=random, device=CUDA).to(dtype)


def empty(codec: str, pages: int, heads: int, page_tokens: int, dim: int) -> Encoded:
    """A cache of nothing but 0xFF bytes."""
    spec = kvq_codecs.get(codec).spec
    planes = {}
    for plane in spec.planes:
        shape = pages, heads, page_tokens, plane.row_items(dim)
        dtype = getattr(torch, plane.dtype)
        size = pages * heads * page_tokens * plane.row_items(dim) * dtype.itemsize
        raw = torch.full((size,), 0xFF, dtype=torch.uint8, device=CUDA)
        planes[plane.name] = raw.view(dtype).view(shape)
    return Encoded(spec, dim, planes)


def put(cache: Encoded, rows: torch.Tensor, pages: list[int]) -> None:
    """Write rows [n, heads, dim] into the first slots of these pages, encoded by the oracle."""
    page, offset = slots(len(rows), pages, cache.lead[2])
    encoded = kvq_codecs.get(cache.spec.name).encode(rows)
    for name, plane in cache.planes.items():
        as_integers(plane)[page, :, offset] = as_integers(encoded.planes[name])


def read(cache: Encoded, length: int, pages: list[int]) -> torch.Tensor:
    """The first rows of these pages, decoded by the oracle: [length, heads, dim] float32."""
    page, offset = slots(length, pages, cache.lead[2])
    packed = cache.map(lambda x: as_integers(x)[page, :, offset].view(x.dtype).contiguous())
    decoded: torch.Tensor = kvq_codecs.get(cache.spec.name).decode(packed)
    return decoded


def slots(length: int, pages: list[int], page_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    position = torch.arange(length, device=CUDA)
    return torch.tensor(pages, device=CUDA)[position // page_tokens], position % page_tokens


def as_integers(plane: torch.Tensor) -> torch.Tensor:
    """The same bits in a dtype that torch can index: uint16 has no index_put."""
    return plane.view(torch.int16) if plane.dtype == torch.uint16 else plane


def expected(scene: Scene, **scoring: Any) -> torch.Tensor:
    """float64 attention over what the caches hold, request by request, on the GPU."""
    outs = []
    for q, pages, length in zip(scene.qs, scene.pages, scene.geometry.lengths, strict=True):
        rows = [read(cache, length, pages) for cache in scene.caches]
        given = {"scale": scene.scale, **scoring}
        outs.append(oracle.attention(q, *rows, **given, device=CUDA))
    return torch.cat(outs)


def check(scene: Scene, out: torch.Tensor, **scoring: Any) -> None:
    """Each token and head within the kernels' tolerance."""
    judge(out, expected(scene, **scoring), scene.geometry.dtype)
