"""The sizes of an extend launch, without one."""

from __future__ import annotations

import pytest
import torch

from kvq_attention.triton.extending import shapes
from kvq_attention.triton.extending.items import MOST_PARTS


@pytest.mark.parametrize("group", [1, 4, 6])
def test_the_bounds_hold_for_any_batch(group: int) -> None:
    """Items and rows of partial results, counted as the device counts them."""
    random = torch.Generator().manual_seed(group)
    rows, most, least = 128, MOST_PARTS.value, shapes.LEAST_PART
    for requests in (1, 2, 7, 40):
        for _ in range(50):
            queries = torch.randint(0, 600, (requests,), generator=random).tolist()
            pasts = torch.randint(0, 9000, (requests,), generator=random).tolist()
            items = partial_rows = 0
            for count, past in zip(queries, pasts, strict=True):
                tiles = -(-count * group // rows)
                parts = max(1, min(most // max(tiles, 1), -(-past // least))) if count else 0
                items += tiles * parts
                partial_rows += count * group * parts if parts > 1 else 0
            bounds = shapes.most_items(sum(queries), requests, group, max(pasts), rows)
            assert items <= bounds[0] and partial_rows <= bounds[1]
