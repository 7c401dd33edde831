"""A kernel that does nothing but read pages of 1 KiB, in the order of a list."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PAGE_WORDS = 256  # of 4 bytes; four words a thread make a load of 16 bytes


@triton.jit  # type: ignore[untyped-decorator]
def _read_pages(  # type: ignore[no-untyped-def]
    pool, order, sums, PAGES: tl.constexpr, ROUNDS: tl.constexpr, WORDS: tl.constexpr
):
    """Each program reads ROUNDS times PAGES pages and writes one sum, or nothing would be read."""
    word = tl.arange(0, WORDS)
    total = tl.zeros([PAGES, WORDS], tl.int32)
    first = tl.program_id(0) * ROUNDS * PAGES
    for i in tl.static_range(ROUNDS):
        page = tl.load(order + first + i * PAGES + tl.arange(0, PAGES)).to(tl.int64)
        total += tl.load(pool + page[:, None] * WORDS + word[None, :])
    tl.store(sums + tl.program_id(0), tl.sum(tl.sum(total, axis=1), axis=0))


def read_pages(
    pool: torch.Tensor, order: torch.Tensor, sums: torch.Tensor, pages: int, rounds: int, warps: int
) -> None:
    """Sum the words of pages int32 [P, PAGE_WORDS] in the order int32 [n] given.

    Each program takes `rounds` loads of `pages` pages and writes its sum, modulo 2³², to
    sums int32 [n / (pages · rounds)]; n must be a multiple of pages · rounds.
    """
    grid = (order.shape[0] // (pages * rounds),)
    _read_pages[grid](
        pool, order, sums, PAGES=pages, ROUNDS=rounds, WORDS=PAGE_WORDS, num_warps=warps
    )
