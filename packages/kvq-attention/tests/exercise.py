"""Every kernel on every codec at small sizes, with slots and pages that caches do not have.

    python exercise.py BACKEND CODEC …
    compute-sanitizer --tool memcheck --error-exitcode 9 python exercise.py BACKEND CODEC …

Of the backend decode is called, stores and copies are Triton's.

A process of its own: a kernel that touched foreign memory would leave its CUDA context unusable,
and a checker watches whole processes. It imports nothing of the tests.
"""

from __future__ import annotations

import sys

import torch

import kvq_codecs
from kvq_attention import Batch, Table, ops
from kvq_codecs import Encoded

TIER, PAGES, KV_HEADS, GROUP, DIM, PAGE_TOKENS, COLUMNS = "full", 96, 2, 3, 128, 16, 72
# Longer than a chunk: partial results are merged. In a window they are not: both ways are gone.
LENGTHS, QUERIES = [1, 1100, 17, 0, 40], [1, 7, 1, 2, 1]
DONE = "exercised"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def cache(codec: str, dim: int) -> Encoded:
    """As a pool is born: zeros."""
    spec = kvq_codecs.get(codec).spec
    lead = PAGES, KV_HEADS, PAGE_TOKENS
    return Encoded(
        spec,
        dim,
        {
            p.name: torch.zeros(
                *lead, p.row_items(dim), dtype=getattr(torch, p.dtype), device=DEVICE
            )
            for p in spec.planes
        },
    )


def batch() -> Batch:
    """Requests on pages of their own, in no order, one padded; the last rows are padding."""
    ids = iter(torch.randperm(PAGES, generator=torch.Generator().manual_seed(0)).tolist())
    table = torch.full((len(LENGTHS), COLUMNS), -1, dtype=torch.int32)
    for r, length in enumerate(LENGTHS):
        for column in range(-(-length // PAGE_TOKENS)):
            table[r, column] = next(ids)
    tokens = sum(QUERIES) + 3
    return Batch(
        torch.tensor([0, *QUERIES]).cumsum(0).to(DEVICE, torch.int32),
        torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE),
        {TIER: Table(table.to(DEVICE), torch.full((tokens,), -1, device=DEVICE))},
        PAGE_TOKENS,
    )


def stored(caches: tuple[Encoded, Encoded], dtype: torch.dtype, seed: int) -> None:
    """Every slot of the caches is written, and slots that they do not have are asked for."""
    random = torch.Generator().manual_seed(seed)
    size = PAGES * PAGE_TOKENS
    foreign = [-1, -2, size, size + 7, 2**31, 2**40, -(2**40), 2**62]
    slots = torch.randperm(size, generator=random).tolist()
    slots[5:5], slots[-1:-1] = foreign, foreign
    rows = [
        torch.randn(len(slots), KV_HEADS, c.dim, generator=random).to(DEVICE, dtype) for c in caches
    ]
    ops.store(*rows, *caches, torch.tensor(slots, device=DEVICE), backend="triton")


def attended(caches: tuple[Encoded, Encoded], dtype: torch.dtype, backend: str) -> None:
    """Decode: right tables give numbers, a page that is not there spoils its request alone."""
    given = batch()
    tokens = given.num_tokens
    random = torch.Generator().manual_seed(1)
    heads = KV_HEADS * GROUP
    q = torch.randn(tokens, heads, caches[0].dim, generator=random).to(DEVICE, dtype)
    sinks = torch.linspace(-1, 1, heads, device=DEVICE)

    def decode(page_table: torch.Tensor, **scoring: object) -> torch.Tensor:
        table = Table(page_table, given.tables[TIER].slot_mapping)
        changed = Batch(given.query_offsets, given.seq_lens, {TIER: table}, PAGE_TOKENS)
        return ops.decode(
            q,
            *caches,
            changed,
            TIER,
            scale=0.1,
            backend=backend,
            **scoring,  # type: ignore[arg-type]
        )

    right = given.tables[TIER].page_table
    for scoring in ({}, {"window": 21, "softcap": 2.0, "sinks": sinks}):
        clean = decode(right, **scoring)
        assert torch.isfinite(clean).all(), "numbers everywhere"
        assert not clean[9:11].any() and not clean[12:].any(), "padding gives 0"
        for page in (-1, -2, PAGES, 2**31 - 1, -(2**31)):
            wrong = right.clone()
            wrong[1, (LENGTHS[1] - 1) // PAGE_TOKENS] = page
            out = decode(wrong, **scoring)
            assert out[7].isnan().all(), "the last query reads the last page"
            others = [0, *range(8, tokens)]
            assert torch.equal(out[others], clean[others]), "other requests are as they were"


def copied(caches: tuple[Encoded, Encoded]) -> None:
    """Copies, with pages that are skipped."""
    source = torch.tensor([0, 3, -1, 5, -1], device=DEVICE)
    target = torch.tensor([47, 46, 45, -1, -1], device=DEVICE)
    ops.copy_pages(caches, source, target, backend="triton")
    for one in caches:
        for plane in one.planes.values():
            raw = plane.view(torch.uint8)
            assert torch.equal(raw[47], raw[0]) and torch.equal(raw[46], raw[3])


def main(backend: str, *codecs: str) -> None:
    """Exercise these codecs."""
    for i, codec in enumerate(codecs):
        dtype = (torch.bfloat16, torch.float16, torch.float32)[i % 3]
        if codec == "bf16":  # cuda takes no other queries with it
            dtype = torch.bfloat16
        caches = cache(codec, DIM), cache(codec, DIM)
        stored(caches, dtype, seed=i)
        attended(caches, dtype, backend)
        copied(caches)
        torch.cuda.synchronize()
        print(DONE, codec, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
