"""Whole pages of planes [P, Hkv, N, items], in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvq_attention import launches
from kvq_attention.errors import SlotError
from kvq_codecs import Encoded


def movable(plane: torch.Tensor) -> torch.Tensor:
    """The same bits in a dtype that torch can index: uint16 has no index_put."""
    return plane.view(torch.int16) if plane.dtype == torch.uint16 else plane


def pages_by_head(plane: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Plane [P, Hkv, N, items] → the pages named, in their order: [Hkv, n, N, items]."""
    return movable(plane).index_select(0, pages).view(plane.dtype).transpose(0, 1)


def copy_pages(
    caches: Sequence[Encoded], source_pages: torch.Tensor, target_pages: torch.Tensor
) -> None:
    """Copy whole pages: see `kvq_attention.ops.copy_pages`."""
    pairs = zip(source_pages.tolist(), target_pages.tolist(), strict=True)
    wanted = [(source, target) for source, target in pairs if source != -1 and target != -1]
    if not wanted:
        return
    num_pages = caches[0].lead[0]
    sources, targets = zip(*wanted, strict=True)
    outside = [page for page in (*sources, *targets) if not 0 <= page < num_pages]
    if outside:
        raise SlotError(f"pages {outside} must lie in [0, {num_pages}); −1 marks a pair to skip")
    if len(set(targets)) < len(targets) or not set(targets).isdisjoint(sources):
        raise SlotError(
            f"each target page is written once and none is a source, got {list(sources)} → "
            f"{list(targets)}"
        )
    launches.record("reference", "copy_pages")
    source, target = (torch.tensor(ids, device=source_pages.device) for ids in (sources, targets))
    for plane in (plane for cache in caches for plane in cache.planes.values()):
        movable(plane)[target] = movable(plane)[source]
