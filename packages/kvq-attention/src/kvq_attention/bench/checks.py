"""Whether what was timed is right: outputs against float64, stored bytes against the codecs."""

from __future__ import annotations

from collections.abc import Iterable

import torch

import kvq_codecs
from kvq_attention import Batch
from kvq_attention.accuracy import MAX_ERROR, relative_error
from kvq_attention.bench.cases import Case, Shape
from kvq_attention.bench.data import TIER, Pool, gathered, row_bytes
from kvq_codecs import Encoded

MAX_DECODE_ERROR = MAX_ERROR[torch.bfloat16]  # the dtype of every query here
STORE_ROWS = 256  # tokens whose stored bytes are compared


def sampled(case: Case, shape: Shape) -> list[tuple[int, int]]:
    """A few (request, query head): the first, one in the middle, the last."""
    pairs = (
        (0, 0),
        (case.batch // 2, shape.heads // 2),
        (case.batch - 1, shape.heads - 1),
    )
    return list(dict.fromkeys(pairs))


def decode_error(
    q: torch.Tensor, out: torch.Tensor, pool: Pool, batch: Batch, case: Case, shape: Shape
) -> float:
    """The largest relative error of the sampled rows of out [B, Hq, D]; infinite if any is NaN.

    The reference is attention in float64 over the decoded cache: the codec's error is not in it.
    """
    if not bool(torch.isfinite(out).all()):
        return torch.inf
    errors = []
    for request, head in sampled(case, shape):
        pages = batch.table(TIER).page_table[request].long()
        k, v = (
            decoded(cache, head * shape.kv_heads // shape.heads, pages)[: case.context]
            for cache in (pool.k, pool.v)
        )
        scores = k @ q[request, head].double() * shape.dim**-0.5
        expected = scores.softmax(dim=0) @ v
        errors.append(relative_error(out[request, head], expected))
    return max(errors)


def stored_exactly(
    pool: Pool, slots: torch.Tensor, rows: Iterable[tuple[Encoded, torch.Tensor]]
) -> bool:
    """Whether the first slots hold the bytes that the codecs give on the CPU.

    `rows`: a cache of the pool and the rows [T, Hkv, D] that were stored into it.
    """
    first = slots[:STORE_ROWS]
    for cache, values in rows:
        expected = kvq_codecs.get(cache.spec.name).encode(values[:STORE_ROWS].cpu())
        for name, plane in cache.planes.items():
            if not torch.equal(
                row_bytes(plane, first).cpu(), expected.planes[name].view(torch.uint8)
            ):
                return False
    return True


def decoded(cache: Encoded, head: int, pages: torch.Tensor) -> torch.Tensor:
    """One head's rows of the pages, in order: float64 [n · N, D]."""
    packed = cache.map(lambda plane: gathered(plane, head, pages))
    rows: torch.Tensor = kvq_codecs.get(cache.spec.name).decode(packed)
    return rows.flatten(0, 1).double()
