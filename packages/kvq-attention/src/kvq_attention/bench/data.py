"""Pools filled with real encodings of N(0, 1) rows, and batches that read them in random order.

A pool holds the inputs of several calls, and each call reads pages of its own, so that together
they are far more than a cache of the GPU holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import kvq_codecs
from kvq_attention import Batch, Table, ops
from kvq_attention.bench.cases import Case, Formats, Shape
from kvq_attention.errors import AttentionError
from kvq_codecs import Encoded

TIER = "bench"
# What the calls of one group read together: 8 times the L2 of an H200, which is 60 MiB.
GROUP_BYTES = 512 << 20
MIN_CALLS = 4
FILL_TOKENS = 1 << 16  # made and encoded at once
MEMORY_SHARE = 0.8  # of what the device has free; the rest is for the rows on their way


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """A layer's cache: planes [P, Hkv, N, items] of K and of V."""

    k: Encoded
    v: Encoded


def calls_for(call_bytes: int, device: str, most: int = 256) -> int:
    """Calls of a group so that it reads `GROUP_BYTES`, and at least `MIN_CALLS`.

    On a CPU two. Raises `AttentionError` when the device has no room for one call.
    """
    if device != "cuda":
        return 2
    kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    free = torch.cuda.mem_get_info()[0] + kept
    room = int(free * MEMORY_SHARE) // call_bytes
    if room < 1:
        raise AttentionError(f"the device has no room for {call_bytes / 2**30:.1f} GiB")
    return min(room, most, max(MIN_CALLS, -(-GROUP_BYTES // call_bytes)))


def empty_pool(formats: Formats, shape: Shape, pages: int, page_tokens: int, device: str) -> Pool:
    """A pool of zero bytes."""
    made = []
    for name in (formats.k, formats.v):
        spec = kvq_codecs.get(name).spec
        lead = pages, shape.kv_heads, page_tokens
        planes = {
            p.name: torch.zeros(
                *lead, p.row_items(shape.dim), dtype=getattr(torch, p.dtype), device=device
            )
            for p in spec.planes
        }
        made.append(Encoded(spec, shape.dim, planes))
    return Pool(*made)


def random_rows(tokens: int, shape: Shape, heads: int, random: torch.Generator) -> torch.Tensor:
    """N(0, 1) rows bfloat16 [tokens, heads, dim] on the generator's device."""
    return torch.randn(
        tokens, heads, shape.dim, generator=random, device=random.device, dtype=torch.bfloat16
    )


def fill(pool: Pool, shape: Shape, backend: str, random: torch.Generator) -> None:
    """Store random rows into every slot, by the op itself."""
    pages, _, page_tokens = pool.k.lead
    slots = pages * page_tokens
    for start in range(0, slots, FILL_TOKENS):
        stop = min(start + FILL_TOKENS, slots)
        k, v = (random_rows(stop - start, shape, shape.kv_heads, random) for _ in "kv")
        where = torch.arange(start, stop, device=random.device)
        ops.store(k, v, pool.k, pool.v, where, backend=backend)


def batches(case: Case, page_tokens: int, calls: int, random: torch.Generator) -> list[Batch]:
    """One batch a call; together they read every page of a pool once, in random order."""
    columns = -(-case.context // page_tokens)
    device = random.device
    pages = torch.randperm(calls * case.batch * columns, generator=random, device=device)
    offsets = torch.arange(case.batch + 1, dtype=torch.int32, device=device)
    lengths = torch.full((case.batch,), case.context, dtype=torch.int32, device=device)
    made = []
    for table in pages.view(calls, case.batch, columns):
        last_slots = table[:, -1] * page_tokens + (case.context - 1) % page_tokens
        tables = {TIER: Table(table.int(), last_slots)}
        made.append(Batch(offsets, lengths, tables, page_tokens, usual_requests=case.batch))
    return made


def gathered(plane: torch.Tensor, head: int, pages: torch.Tensor) -> torch.Tensor:
    """The pages named of one head of a plane [P, Hkv, N, items]: [n, N, items].

    By bytes, since torch indexes no uint16.
    """
    found: torch.Tensor = plane[:, head].view(torch.uint8).index_select(0, pages).view(plane.dtype)
    return found


def row_bytes(plane: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Bytes of the rows in slots of a plane [P, Hkv, N, items]: uint8 [n, Hkv, bytes]."""
    page_tokens = plane.shape[2]
    rows: torch.Tensor = plane.view(torch.uint8)[slots // page_tokens, :, slots % page_tokens]
    return rows
