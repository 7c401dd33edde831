"""Every route and kernel of Triton's extend at small sizes, with pages that are not there.

    python exercise_extend.py CODEC …
    compute-sanitizer --tool memcheck --error-exitcode 9 python exercise_extend.py CODEC …

What decides between routes is set so low that requests of a few dozen query rows take all of them.
A process of its own, like exercise.py's, which it imports; it says which kernels it launched.
A tool may watch our kernels alone, which makes it minutes faster. initcheck then takes what torch's
kernels wrote for unwritten, but not what was once copied from the host, and it complains of copies
to the host, too: what kernels read is `known`, and results are compared on the host.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from triton.runtime.jit import KernelInterface

from exercise import DEVICE, DIM, DONE, GROUP, KV_HEADS, PAGE_TOKENS, PAGES, TIER, cache, stored
from kvq_attention import Batch, Table, ops
from kvq_attention.dense import Dense
from kvq_attention.triton.extending import dense, portions, routes, scratch, shapes, step
from kvq_codecs import Encoded

LAUNCHED = "launched"
# Per request: nothing before the chunk, few rows and several parts of a past, padding, many rows
# over a past and over none, a decode beside them.
LENGTHS, QUERIES = [5, 180, 0, 250, 32, 33], [5, 2, 2, 32, 32, 1]
PADDED, PADDING = slice(7, 9), 3  # rows of the request that is padding; rows of no request
# From which on: a past is unpacked, query rows; dense kernels are taken, products of 32 rows
THROUGH, DENSELY = 64, 300_000
LEAST_PART = 80  # tokens
# Of the scratch: whole; some heads and parts of the past of the request that has many rows.
WHOLE, SCRATCH_PARTS, DENSE_PARTS = 4 << 20, 240 << 10, 256 << 10


def known(rows: torch.Tensor) -> torch.Tensor:
    """The same in new memory, of which a tool sees that all of it is written."""
    fresh = torch.zeros(rows.shape, dtype=rows.dtype).to(DEVICE)
    fresh.view(torch.uint8).add_(rows.contiguous().view(torch.uint8))
    return fresh


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of torch's dense kernels, which a tool would watch for minutes: plain products."""
    k, v = (rows.repeat_interleave(q.shape[0] // k.shape[0], 0).float() for rows in (k, v))
    scores = q.float() @ k.transpose(1, 2) * scale
    if causal:
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(hidden, float("-inf"))
    return known((scores.softmax(-1) @ v).to(q.dtype)), known(scores.logsumexp(-1))


def zeros(like: torch.Tensor, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """In place of `Tensor.new_zeros`."""
    return torch.zeros(*shape, dtype=dtype).to(like.device)


def smaller() -> None:
    """Few rows and short pasts take the routes of many and long ones."""
    dense.fastest = lambda *_: Dense("plain", attend)
    routes.BREAK_EVEN, dense.FEWEST_PRODUCTS = THROUGH, DENSELY
    scratch.LEAST_SHARE = 64
    torch.Tensor.new_zeros = zeros
    whole = step.Step.requests

    def some(of: step.Step, *which: int) -> step.Step:
        found = whole(of, *which)
        return replace(
            found, query_offsets=known(found.query_offsets), seq_lens=known(found.seq_lens)
        )

    step.Step.requests = some
    portions.GRAIN = portions.ENOUGH = 16
    shapes.LEAST_PART = LEAST_PART


def noting_launches() -> set[str]:
    """The names of kernels that are launched from now on."""
    found: set[str] = set()
    launcher = KernelInterface.__getitem__

    def noted(self: Any, grid: Any) -> Any:
        found.add(self.__name__)
        return launcher(self, grid)

    KernelInterface.__getitem__ = noted
    return found


def batch() -> Batch:
    """The requests on pages of their own, in no order; the last rows are padding."""
    ids = iter(torch.randperm(PAGES, generator=torch.Generator().manual_seed(0)).tolist())
    columns = -(-max(LENGTHS) // PAGE_TOKENS)
    table = torch.full((len(LENGTHS), columns), -1, dtype=torch.int32)
    for r, length in enumerate(LENGTHS):
        for column in range(-(-length // PAGE_TOKENS)):
            table[r, column] = next(ids)
    slots = torch.full((sum(QUERIES) + PADDING,), -1).to(DEVICE)
    return Batch(
        torch.tensor([0, *QUERIES]).cumsum(0).to(DEVICE, torch.int32),
        torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE),
        {TIER: Table(table.to(DEVICE), slots)},
        PAGE_TOKENS,
    )


def extended(caches: tuple[Encoded, Encoded], dtype: torch.dtype) -> None:
    """Right tables give the same numbers by each route, a missing page spoils its request alone."""
    given = batch()
    random = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(given.num_tokens, heads, DIM, generator=random).to(DEVICE, dtype)
        for heads in (KV_HEADS * GROUP, KV_HEADS, KV_HEADS)
    )
    sinks = {"sinks": torch.linspace(-1, 1, KV_HEADS * GROUP).to(DEVICE)}
    on_host = tuple(given.requests())

    def extend(table: torch.Tensor, bound: int, *, host: bool, **scoring: Any) -> torch.Tensor:
        tables = {TIER: Table(table, given.tables[TIER].slot_mapping)}
        changed = replace(given, tables=tables, host=on_host if host else None)
        out = ops.extend(
            *(q, k, v, *caches, changed, TIER),
            **{"scale": 0.1, "scratch_bytes": bound, "backend": "triton", **scoring},
        )
        return (known(out) if host else out).cpu()  # torch writes what is padding there

    right = given.tables[TIER].page_table
    loop = extend(right, 0, host=False, **sinks)
    extend(right, 0, host=False, window=21, softcap=2.0, **sinks)
    extend(right, WHOLE, host=False, window=50)  # the scratch begins within a page
    for bound, host in (
        *((0, False), (WHOLE, False), (SCRATCH_PARTS, False)),
        *((WHOLE, True), (DENSE_PARTS, True)),
    ):
        checked(lambda table, b=bound, h=host: extend(table, b, host=h, **sinks), right, loop)


def checked(
    extend: Callable[[torch.Tensor], torch.Tensor], right: torch.Tensor, wanted: torch.Tensor
) -> None:
    """One route gives what another does."""
    clean = extend(right)
    assert torch.isfinite(clean).all(), "numbers everywhere"
    assert not clean[PADDED].any() and not clean[-PADDING:].any(), "padding gives 0"
    error = (clean.double() - wanted.double()).norm() / wanted.double().norm()
    assert error < 1e-2, f"{error:.2g} from what the loop gives"
    starts = torch.tensor([0, *QUERIES]).cumsum(0).tolist()
    wrong = right.clone()
    wrong[1, 2], wrong[3, 2] = PAGES, -1
    out = extend(wrong)
    for request in (1, 3):
        own = slice(starts[request], starts[request + 1])
        assert out[own].isnan().all(), "all queries read the third page"
        out[own] = clean[own]
    assert torch.equal(out, clean), "other requests are as they were"


def main(*codecs: str) -> None:
    """Exercise these codecs."""
    smaller()
    launched = noting_launches()
    for i, codec in enumerate(codecs):
        dtype = (torch.bfloat16, torch.float16)[i % 2]
        caches = cache(codec, DIM), cache(codec, DIM)
        stored(caches, dtype, seed=i)
        k, v = (
            Encoded(c.spec, c.dim, {name: known(p) for name, p in c.planes.items()}) for c in caches
        )
        launched.clear()
        extended((k, v), dtype)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        print(LAUNCHED, *sorted(launched), flush=True)
        print(DONE, codec, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
