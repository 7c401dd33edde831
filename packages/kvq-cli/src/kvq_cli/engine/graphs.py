"""Decodes replayed from CUDA graphs: one graph for each number of rows, over tensors that stay.

A step of decodes alone launches some hundred kernels a model, which takes a host longer than a GPU
takes to run them for few requests. A graph launches them at once. What changes from step to step,
tokens, positions, lengths, tables and slots, is copied into the tensors that the graph reads.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvq_attention import Batch, Table
from kvq_cli.engine.request import Request
from kvq_pools import PoolPlan, pages_for_tokens

NO_PAGE = NO_SLOT = -1
FEW, APART = (1, 2, 4), 8  # rows of the smallest graphs, and between those of larger ones

Run = Callable[["Static"], torch.Tensor]
# What computes once into tensors that stay, and then again as often as it is called.
Capture = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]]


def sizes(most: int) -> tuple[int, ...]:
    """Numbers of rows for up to `most` decodes a step: 1, 2, 4, then multiples of 8."""
    return tuple(sorted({*(n for n in FEW if n < most), *range(APART, most, APART), most}))


def capture_on_gpu(run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """A CUDA graph of `run`, and the tensor that its replays write."""
    stream: Any = torch.cuda.Stream
    side = stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # compiles kernels, and makes what libraries make once
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=_memory()):
        out = run()
    return graph.replay, out


_pools: list[Any] = []


def _memory() -> Any:
    """One pool of memory for all graphs, as only one runs at a time."""
    if not _pools:
        _pools.append(torch.cuda.graph_pool_handle())
    return _pools[0]


@dataclass(frozen=True, slots=True, eq=False)
class Static:
    """The tensors that a graph of `rows` decodes reads.

    Attributes
    ----------
    tokens, positions : int64 [1, rows]
    last : int64 [rows], all rows: each has a next token
    batch : the requests; its tables have as many columns as the longest request needs
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    last: torch.Tensor
    batch: Batch

    @classmethod
    def of(cls, rows: int, plan: PoolPlan, max_tokens: int, device: torch.device) -> Static:
        """Rows of which none is anybody's."""
        columns = pages_for_tokens(max_tokens, plan.page_tokens)

        def full(shape: tuple[int, ...], value: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        tables = {
            tier.name: Table(
                full((rows, columns), NO_PAGE, torch.int32), full((rows,), NO_SLOT, torch.int64)
            )
            for tier in plan.tiers
        }
        offsets = torch.arange(rows + 1, dtype=torch.int32, device=device)
        return cls(
            full((1, rows), 0, torch.int64),
            full((1, rows), 0, torch.int64),
            torch.arange(rows, device=device),
            Batch(offsets, full((rows,), 0, torch.int32), tables, plan.page_tokens),
        )


class _Graph:
    """A graph and what it was told last."""

    def __init__(
        self, run: Run, capture: Capture, rows: int, plan: PoolPlan, max_tokens: int, device: Any
    ) -> None:
        self.static = static = Static.of(rows, plan, max_tokens, device)
        self.replay, self.logits = capture(lambda: run(static))
        self.rows = rows
        self._pages: dict[str, list[list[int]]] = {
            tier: [[] for _ in range(rows)] for tier in static.batch.tables
        }

    def compute(self, requests: Sequence[Request]) -> torch.Tensor:
        """Logits [R, vocabulary] of the newest tokens; they last until the next call."""
        ends = [request.num_computed + 1 for request in requests]
        spare = self.rows - len(requests)
        tokens = [request.step_tokens(1)[0] for request in requests]
        self._put(self.static.tokens[0], [*tokens, *[0] * spare])
        self._put(self.static.positions[0], [*(end - 1 for end in ends), *[0] * spare])
        self._put(self.static.batch.seq_lens, [*ends, *[0] * spare])
        for tier, table in self.static.batch.tables.items():
            slots = [_slot(request, tier) for request in requests]
            self._put(table.slot_mapping, [*slots, *[NO_SLOT] * spare])
            for row, request in enumerate(requests):
                self._put_pages(table.page_table, tier, row, request)
        self.replay()
        return self.logits[: len(requests)]

    def _put_pages(self, table: torch.Tensor, tier: str, row: int, request: Request) -> None:
        assert request.pages is not None
        pages = request.pages.tables[tier]
        if pages != self._pages[tier][row]:
            self._pages[tier][row] = list(pages)
            padded = np.full(table.shape[1], NO_PAGE, np.int32)
            padded[: len(pages)] = pages
            table[row].copy_(torch.from_numpy(padded), non_blocking=True)

    @staticmethod
    def _put(target: torch.Tensor, values: Sequence[int]) -> None:
        target.copy_(torch.tensor(values, dtype=target.dtype), non_blocking=True)


def _slot(request: Request, tier: str) -> int:
    assert request.pages is not None
    return int(request.pages.slots(tier, request.num_computed, request.num_computed + 1)[0])


class DecodeGraphs:
    """Graphs for steps of up to `most` decodes; made when first needed, or all by `prepare`."""

    def __init__(
        self,
        run: Run,
        plan: PoolPlan,
        *,
        most: int,
        max_tokens: int,
        device: torch.device,
        capture: Capture = capture_on_gpu,
    ) -> None:
        """`run`: the model over a `Static`; `max_tokens`: of the longest request."""
        self._run, self._plan, self._capture = run, plan, capture
        self._sizes, self._max_tokens, self._device = sizes(most), max_tokens, device
        self._graphs: dict[int, _Graph] = {}

    def prepare(self) -> int:
        """Make all of them, the largest first, into whose memory the others fit; how many."""
        for rows in reversed(self._sizes):
            self._graph(rows)
        return len(self._sizes)

    def compute(self, requests: Sequence[Request]) -> torch.Tensor:
        """Logits [R, vocabulary] of each request's newest token, 1 … `most` of them."""
        return self._graph(self._sizes[bisect_left(self._sizes, len(requests))]).compute(requests)

    def _graph(self, rows: int) -> _Graph:
        if rows not in self._graphs:
            given = self._run, self._capture, rows, self._plan, self._max_tokens, self._device
            self._graphs[rows] = _Graph(*given)
        return self._graphs[rows]
