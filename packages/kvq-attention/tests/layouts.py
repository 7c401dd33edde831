"""The same cache in other memory: heads or tokens first, views inside larger blocks, offsets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

import kvq_codecs
from kvq_codecs import Encoded

Caches = tuple[Encoded, Encoded]
ALIGNED = 256  # bytes; where a plane begins in a block of several


def tokens_first(caches: Caches) -> Caches:
    """Memory is [P, N, Hkv, items] (NHD), the views stay [P, Hkv, N, items]."""
    return _each(caches, lambda plane: plane.transpose(1, 2).contiguous().transpose(1, 2))


def padded(caches: Caches) -> Caches:
    """Dead items after each row, each head's tokens and each page's heads."""

    def pad(plane: torch.Tensor) -> torch.Tensor:
        pages, heads, tokens, items = plane.shape
        whole = _filled(plane, (pages, heads + 1, tokens + 3, items + 16))
        return _copied(plane, whole[:, :heads, :tokens, :items])

    return _each(caches, pad)


def one_block(caches: Caches) -> Caches:
    """K's planes, then V's, one after another in a single block that begins with other bytes."""
    sizes = {}
    for which, cache in enumerate(caches):
        for name, plane in cache.planes.items():
            sizes[which, name] = -(-plane.numel() * plane.itemsize // ALIGNED) * ALIGNED
    device = next(iter(caches[0].planes.values())).device
    block = torch.full((ALIGNED + sum(sizes.values()),), 0xFF, dtype=torch.uint8, device=device)
    start = ALIGNED

    def place(which: int, name: str, plane: torch.Tensor) -> torch.Tensor:
        nonlocal start
        raw = block[start : start + plane.numel() * plane.itemsize]
        start += sizes[which, name]
        view = raw.view(plane.dtype).view(plane.shape)
        assert view.storage_offset() > 0
        return _copied(plane, view)

    k, v = (
        Encoded(c.spec, c.dim, {n: place(which, n, plane) for n, plane in c.planes.items()})
        for which, c in enumerate(caches)
    )
    return k, v


def page_of_everything(caches: Caches, layers: int = 3, layer: int = 1) -> Caches:
    """Each page is one run of bytes: layer by layer, K's planes and V's; this is a middle layer."""
    parts: list[tuple[int, str, torch.Tensor, int]] = []
    size = 0
    for which, cache in enumerate(caches):
        for name, plane in cache.planes.items():
            parts.append((which, name, plane, size))
            size += -(-plane[0].numel() * plane.itemsize // 16) * 16
    pages, first = parts[0][2].shape[0], parts[0][2]
    block = torch.full((pages, layers, size), 0xFF, dtype=torch.uint8, device=first.device)
    views: dict[int, dict[str, torch.Tensor]] = {0: {}, 1: {}}
    for which, name, plane, start in parts:
        raw = block[:, layer, start : start + plane[0].numel() * plane.itemsize]
        view = raw.view(plane.dtype).unflatten(1, plane.shape[1:])
        assert (
            view.data_ptr() >= block.data_ptr() and view.stride(0) * plane.itemsize == layers * size
        )
        views[which][name] = _copied(plane, view)
    k, v = (Encoded(c.spec, c.dim, views[which]) for which, c in enumerate(caches))
    return k, v


LAYOUTS: Mapping[str, Callable[[Caches], Caches]] = {
    "tokens_first": tokens_first,
    "padded": padded,
    "one_block": one_block,
    "page_of_everything": page_of_everything,
}


def sparse(codec: str, dim: int, lead: tuple[int, int, int], folder: Path, tag: str) -> Encoded:
    """A cache on the CPU in files of zeros that take no room until they are written."""
    spec = kvq_codecs.get(codec).spec
    planes = {}
    for plane in spec.planes:
        shape = (*lead, plane.row_items(dim))
        path = folder / f"{tag}-{plane.name}"
        dtype = np.dtype(plane.dtype)
        with path.open("wb") as file:
            file.truncate(math.prod(shape) * dtype.itemsize)
        planes[plane.name] = torch.from_numpy(np.memmap(path, dtype, "r+", shape=shape))
    return Encoded(spec, dim, planes)


def _each(caches: Caches, move: Callable[[torch.Tensor], torch.Tensor]) -> Caches:
    k, v = (cache.map(move) for cache in caches)
    return k, v


def _filled(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """All bytes 0xFF."""
    size = math.prod(shape) * like.itemsize
    raw = torch.full((size,), 0xFF, dtype=torch.uint8, device=like.device)
    return raw.view(like.dtype).view(shape)


def _copied(plane: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """The view, holding what the plane holds."""
    view.copy_(plane)
    return view
