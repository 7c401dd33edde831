"""Decodes replayed from CUDA graphs: one graph for each number of rows, over tensors that stay.

A step of decodes alone launches some hundred kernels a model, which takes a host longer than a GPU
takes to run them for few requests. A graph launches them at once. What changes from step to step,
tokens, positions, lengths, slots and the newest pages, is written into one block of host memory and
copied in one go into the tensors that the graph reads.
"""

from __future__ import annotations

import logging
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
import torch

from kvq_attention import Batch, Table, UnsupportedError
from kvq_cli.engine.request import Request
from kvq_pools import PoolPlan, SequencePages, pages_for_tokens

logger = logging.getLogger(__name__)

NO_PAGE = NO_SLOT = -1
FEW, APART = (1, 2, 4), 8  # rows of the smallest graphs, and between those of larger ones
# Lines of the block of host memory, a column a row of the graph: these (of a linear-attention model
# also where a request's state is), and for each tier a slot, and of its newest pages the columns of
# the page table and the pages.
TOKEN, POSITION, LENGTH, STATE, TIERS = range(5)
# A decode fills a page or begins one, and a page that is full may become another's that holds the
# same: the last two of a table are all that one token changes.
NEWEST = 2
SLOT, COLUMNS, PAGES, TIER_LINES = 0, 1, 1 + NEWEST, 1 + 2 * NEWEST

K = TypeVar("K")
G = TypeVar("G")

Run = Callable[["Static"], torch.Tensor]
# What computes once into tensors that stay, and then again as often as it is called.
Capture = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]]


def sizes(most: int) -> tuple[int, ...]:
    """Numbers of rows for up to `most` decodes a step: 1, 2, 4, then multiples of 8."""
    return tuple(sorted({*(n for n in FEW if n < most), *range(APART, most, APART), most}))


@contextmanager
def _no_wait() -> Iterator[None]:
    """Where the host waits for the device, raise: a capture that does fails, and not cleanly."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that it does not find all of them
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@cache
def _side_stream(device: int) -> Any:
    """On which what is captured is tried: libraries keep workspaces for each stream, for good."""
    stream: Any = torch.cuda.Stream
    return stream(device)


def _left_open(memory: Any) -> bool:
    """Whether torch left a pool open at a capture that failed; it is closed, and given back.

    Where the driver itself ends a capture, as something waits that torch does not know of, torch
    goes on as if it were under way: caches cannot be emptied, and the pool is never free.
    """
    device = torch.cuda.current_device()
    try:
        torch._C._cuda_endAllocateToPool(device, memory)
    except RuntimeError:  # torch has closed it, and gives it back with its graphs
        return False
    torch._C._cuda_releasePool(device, memory)
    return True


class OnGpu:
    """CUDA graphs that share their memory, as only one of them runs at a time."""

    def __init__(self) -> None:
        # A pool that no graph holds any more cannot be used again.
        self._memory: Any = None
        self._holding: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._side = _side_stream(torch.cuda.current_device())

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """A graph of `run`, and the tensor that its replays write."""
        side = self._side
        side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side):
                run()  # compiles kernels, and makes what libraries make once
                with _no_wait():
                    run()
        finally:  # what failed may still write to tensors whose memory is another's soon
            torch.cuda.current_stream().wait_stream(side)
        if not self._holding:
            self._memory = torch.cuda.graph_pool_handle()
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=self._memory):
                out = run()
        except Exception:
            if _left_open(self._memory):
                self._holding.clear()  # its part of pinned memory stays so: take another
            raise
        finally:  # torch leaves its own stream behind where the end of a capture fails
            torch.cuda.set_stream(here)
        self._holding.add(graph)
        return graph.replay, out


class Making(Generic[K, G]):
    """Graphs by what they are for; where one cannot be made, no more are.

    What a model and its kernels do may be nothing that a graph can hold, or memory is short: steps
    are then computed without.
    """

    def __init__(self, what: str) -> None:
        """`what`: they replay, in words."""
        self.graphs: dict[K, G] = {}
        self.failed = False
        self._what = what

    def get(self, key: K, make: Callable[[], G]) -> G | None:
        """The graph of that key; None when it cannot be made, or one before it could not."""
        if key not in self.graphs and not self.failed:
            try:
                self.graphs[key] = make()
            except UnsupportedError:  # of what was asked for: whoever asked is told
                raise
            except Exception as error:  # a model and its kernels may raise anything
                self.fail(error)
        return self.graphs.get(key)

    def has(self, key: K) -> bool:
        """Whether a graph of that key is there, or may be made."""
        return key in self.graphs or not self.failed

    def fail(self, error: Exception) -> None:
        """Make no more, and say why."""
        self.failed = True
        told = self._what, type(error).__name__, " ".join(str(error).split())
        logger.warning("no more CUDA graphs of %s can be made: %s: %s", *told)


@dataclass(frozen=True, slots=True, eq=False)
class Static:
    """The tensors that a graph of `rows` decodes reads.

    Attributes
    ----------
    block : int64 [lines, rows], what the host gives
    tokens, positions : int64 [1, rows], of the block
    last : int64 [rows], all rows: each has a next token
    states : int64 [rows], of the block: slots of a `StatePool`; nobody's is the first
    batch : the requests; its tables have as many columns as the longest request needs
    """

    block: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    last: torch.Tensor
    states: torch.Tensor
    batch: Batch

    @classmethod
    def of(
        cls,
        rows: int,
        plan: PoolPlan,
        max_tokens: int,
        usual_requests: int | None,
        device: torch.device,
    ) -> Static:
        """Rows of which none is anybody's."""
        columns = pages_for_tokens(max_tokens, plan.page_tokens)
        block = torch.from_numpy(nobodys(rows, len(plan.tiers))).to(device)
        tables = {
            tier.name: Table(
                torch.full((rows, columns), NO_PAGE, dtype=torch.int32, device=device),
                lines[SLOT],
            )
            for tier, lines in zip(plan.tiers, _by_tier(block), strict=True)
        }
        offsets = torch.arange(rows + 1, dtype=torch.int32, device=device)
        lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        return cls(
            block,
            block[TOKEN : TOKEN + 1],
            block[POSITION : POSITION + 1],
            torch.arange(rows, device=device),
            block[STATE],
            Batch(offsets, lengths, tables, plan.page_tokens, usual_requests=usual_requests),
        )

    def read_block(self) -> None:
        """Bring lengths and page tables up to date; a part of the graph."""
        self.batch.seq_lens.copy_(self.block[LENGTH])
        for table, lines in zip(self.batch.tables.values(), _by_tier(self.block), strict=True):
            columns, pages = lines[COLUMNS:PAGES], lines[PAGES:]
            table.page_table.scatter_(1, columns.t(), pages.t().to(torch.int32))


def nobodys(rows: int, tiers: int) -> npt.NDArray[np.int64]:
    """The block [lines, rows] when no row is anybody's."""
    block = np.zeros((TIERS + tiers * TIER_LINES, rows), np.int64)
    for lines in _by_tier(block):
        lines[SLOT], lines[PAGES:] = NO_SLOT, NO_PAGE
    return block


def _by_tier(block: Any) -> list[Any]:
    """The lines of each tier."""
    return [block[at : at + TIER_LINES] for at in range(TIERS, len(block), TIER_LINES)]


class _Graph:
    """A graph and what it was told last."""

    def __init__(
        self,
        run: Run,
        capture: Capture,
        rows: int,
        plan: PoolPlan,
        max_tokens: int,
        usual_requests: int | None,
        device: Any,
    ) -> None:
        self.static = static = Static.of(rows, plan, max_tokens, usual_requests, device)

        def once() -> torch.Tensor:
            static.read_block()
            return run(static)

        self.replay, self.logits = capture(once)
        self.rows, self._page_tokens = rows, plan.page_tokens
        # Pinned, so that their copies run beside the host. Two, as a step may be given while the
        # one before it is computed; the one before that has its tokens on the host by then.
        self._hosts = [
            torch.empty_like(static.block, device="cpu", pin_memory=device.type == "cuda")
            for _ in range(2)
        ]
        self._nobodys = nobodys(rows, len(plan.tiers))
        # Of each row whose pages the tables hold, and how many of them cannot change any more.
        self._held: list[tuple[SequencePages | None, int]] = [(None, 0)] * rows

    def compute(
        self,
        requests: Sequence[Request],
        tokens: torch.Tensor | None,
        states: Sequence[int] | None,
    ) -> torch.Tensor:
        """Logits [R, vocabulary] of the newest tokens; they last until the next call."""
        used, computed = len(requests), np.asarray([r.num_computed for r in requests])
        self._hosts.reverse()
        block: npt.NDArray[np.int64] = self._hosts[0].numpy()
        block[:, used:] = self._nobodys[:, used:]
        self._held[used:] = [(None, 0)] * (self.rows - used)
        if tokens is None:
            block[TOKEN, :used] = [r.tokens[r.num_computed] for r in requests]
        block[POSITION, :used] = computed + (tokens is not None)
        block[LENGTH, :used] = block[POSITION, :used] + 1
        if states is not None:
            block[STATE, :used] = states
        sequences = [r.pages for r in requests if r.pages is not None]
        self._put_pages(sequences, computed // self._page_tokens, block[:, :used])
        self.static.block.copy_(self._hosts[0], non_blocking=True)
        if tokens is not None:
            torch.clamp(tokens, min=0, out=self.static.tokens[0, :used])
        self.replay()
        return self.logits[:used]

    def _put_pages(
        self,
        sequences: Sequence[SequencePages],
        settled: npt.NDArray[np.int64],
        block: npt.NDArray[np.int64],
    ) -> None:
        """What is new of each row's tables into its block; all of them, where others' were.

        `settled`: how many pages of each are full, and found in the prefix cache if it has them
        """
        index, offset = np.divmod(block[POSITION], self._page_tokens)
        first = []
        places = zip(sequences, index.tolist(), settled.tolist(), strict=True)
        for row, (pages, newest, done) in enumerate(places):
            known, begin = self._held[row]
            if pages is not known or newest - begin >= NEWEST:
                begin = max(0, newest - NEWEST + 1)
                for tier, held in self.static.batch.tables.items():
                    self._put_row(held.page_table, row, pages.tables[tier])
            first.append(begin)
            self._held[row] = pages, done
        columns = np.minimum(np.asarray(first) + np.arange(NEWEST)[:, None], index)
        for tier, lines in zip(self.static.batch.tables, _by_tier(block), strict=True):
            tables = [pages.tables[tier] for pages in sequences]
            lines[COLUMNS:PAGES] = columns
            lines[PAGES:] = [
                [table[column] for table, column in zip(tables, line, strict=True)]
                for line in columns.tolist()
            ]
            lines[SLOT] = lines[-1] * self._page_tokens + offset  # the last page of each

    @staticmethod
    def _put_row(page_table: torch.Tensor, row: int, pages: Sequence[int]) -> None:
        padded = np.full(page_table.shape[1], NO_PAGE, np.int32)
        padded[: len(pages)] = pages
        page_table[row].copy_(torch.from_numpy(padded), non_blocking=True)


class DecodeGraphs:
    """Graphs for steps of up to `most` decodes; made when first needed, or all by `prepare`."""

    def __init__(
        self,
        run: Run,
        plan: PoolPlan,
        *,
        most: int,
        max_tokens: int,
        usual_requests: int | None,
        device: torch.device,
        capture: Capture,
    ) -> None:
        """`run`: the model over a `Static`; `max_tokens`: of the longest request.

        `usual_requests`: that run at once, in graphs or not; see `Batch.usual_requests`.
        """
        self._run, self._plan, self._capture = run, plan, capture
        self._sizes, self._device = sizes(most), device
        self._max_tokens, self._usual_requests = max_tokens, usual_requests
        self.making: Making[int, _Graph] = Making("decodes")

    def prepare(self) -> int:
        """Make all of them, the largest first, into whose memory the others fit; how many."""
        for rows in reversed(self._sizes):
            self._graph(rows)
        return len(self.making.graphs)

    def compute(
        self,
        requests: Sequence[Request],
        tokens: torch.Tensor | None = None,
        states: Sequence[int] | None = None,
    ) -> torch.Tensor | None:
        """Logits [R, vocabulary] of each request's newest token, 1 … `most` of them.

        None: no graph can be made.

        `tokens` int64 [R]: the newest ones, which the requests do not have yet, on the device.
        `states`: slots of the requests' states, where they have any.
        """
        graph = self._graph(self._sizes[bisect_left(self._sizes, len(requests))])
        return None if graph is None else graph.compute(requests, tokens, states)

    def _graph(self, rows: int) -> _Graph | None:
        return self.making.get(
            rows,
            lambda: _Graph(
                *(self._run, self._capture, rows, self._plan),
                *(self._max_tokens, self._usual_requests, self._device),
            ),
        )
