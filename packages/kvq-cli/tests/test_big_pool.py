"""Pages whose bytes lie beyond what 32 bits can address, through the pool and the attention."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import kvq_codecs
from kvq_attention import Batch, Table, ops
from kvq_pools import Pool, mha, slots

PAGE_TOKENS, HEADS, DIM, TOKENS = 16, 8, 128, 40
CODES_OF_A_PAGE = PAGE_TOKENS * HEADS * DIM // 2  # q4_0: two values a byte
BEYOND = (1 << 32) // CODES_OF_A_PAGE + 8  # pages: the last bytes of a plane lie past 4 GiB


def attend(pool: Pool, table: Sequence[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Store TOKENS tokens in the pages of `table`, read them: the output, and the pages' bytes."""
    torch.manual_seed(0)
    k, v = (torch.randn(TOKENS, HEADS, DIM, device="cuda") for _ in "kv")
    q = torch.randn(1, 2 * HEADS, DIM, device="cuda")
    caches = pool.view("k", 1), pool.view("v", 1)
    places = torch.from_numpy(slots(table, 0, TOKENS, PAGE_TOKENS)).cuda()
    ops.store(k, v, *caches, places, backend="reference")
    batch = Batch(
        query_offsets=torch.tensor([0, 1], dtype=torch.int32, device="cuda"),
        seq_lens=torch.tensor([TOKENS], dtype=torch.int32, device="cuda"),
        tables={
            "full": Table(
                page_table=torch.tensor([table], dtype=torch.int32, device="cuda"),
                slot_mapping=places[-1:],
            )
        },
        page_tokens=PAGE_TOKENS,
    )
    out = ops.decode(q, *caches, batch, "full", scale=DIM**-0.5, backend="reference")
    stored = [plane[p].cpu() for cache in caches for plane in cache.planes.values() for p in table]
    return out.cpu(), stored


@pytest.mark.gpu
def test_p118_pages_past_4_gib_read_and_write_like_the_first_ones() -> None:
    spec = kvq_codecs.get("q4_0").spec
    plan = mha(
        layers=range(2), kv_heads=HEADS, head_dim=DIM, k=spec, v=spec, page_tokens=PAGE_TOKENS
    )
    if plan.nbytes(BEYOND) > torch.cuda.mem_get_info()[0]:
        pytest.skip(f"needs {plan.nbytes(BEYOND):,} free bytes on the device")
    pool = Pool(
        plan,
        BEYOND,
        empty=lambda shape, kind: torch.empty(shape, dtype=getattr(torch, kind), device="cuda"),
    )
    low, high = (0, 1, 2), (BEYOND - 1, BEYOND - 2, BEYOND - 3)
    wrapped = tuple(page - (1 << 32) // CODES_OF_A_PAGE for page in high)  # 4 GiB below
    out_low, bytes_low = attend(pool, low)
    out_high, bytes_high = attend(pool, high)
    assert torch.equal(out_low, out_high)
    assert all(torch.equal(a, b) for a, b in zip(bytes_low, bytes_high, strict=True))
    assert out_low.abs().sum() > 0
    for name in "kv":
        for plane in pool.view(name, 1).planes.values():
            assert all(not plane[page].view(torch.uint8).any() for page in wrapped)
            assert not plane[BEYOND].view(torch.uint8).any()  # the padding page
