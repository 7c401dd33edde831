"""Launches of the kernel that copies pages."""

from __future__ import annotations

import torch
from compiling import Jobs
from store_jobs import PAGES, cache

from kvq_attention.triton.copy import copy_pages


def jobs() -> Jobs:
    """K and V of four layers."""
    yield (
        "copy_pages",
        lambda: copy_pages(
            [cache("q4_0"), cache("q4_0")] * 4,
            torch.empty(PAGES // 2, dtype=torch.int64),
            torch.empty(PAGES // 2, dtype=torch.int64),
        ),
    )
