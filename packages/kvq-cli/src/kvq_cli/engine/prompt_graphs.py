"""Prompts' chunks replayed from CUDA graphs: one graph for each number of tokens and reach.

A chunk of some hundred tokens keeps a fast GPU busy for less time than a host needs to launch what
it consists of. A graph is for one prompt; a chunk of fewer tokens is padded. What changes from step
to step is copied in one go into the tensors that the graph reads. Its page table reaches as far as
some multiple of what the chunk sees, not as far as the longest request: what a past is decoded
into, and how many launches look for a part of it, follows from that.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvq_attention import Batch, Table
from kvq_attention.routes import Route
from kvq_cli.engine.graphs import NO_PAGE, NO_SLOT, Capture, Making
from kvq_cli.engine.request import Request
from kvq_pools import PoolPlan, pages_for_tokens

# Tokens of the smallest graphs, and between larger ones; from 512 on a quarter at most
FEW, APART = (16, 32), 64
AS_LONG = 1.05  # times the other: what differs by less may be chance
NEAREST, FARTHER = 8192, 8  # tokens of the shortest reach, and by how much the next one is longer

Run = Callable[["Chunk"], torch.Tensor]


def sizes(most: int) -> tuple[int, ...]:
    """Numbers of tokens for chunks of up to `most`: 16, 32, 64, 128, … 512, 640, … `most`."""
    found, size = [n for n in FEW if n < most], APART
    while size < most:
        found.append(size)
        size += max(APART, 1 << (size.bit_length() - 3))
    return (*found, most)


def reaches(max_tokens: int) -> tuple[int, ...]:
    """Tokens of the longest request of each graph: 8,192, eight times as many, … `max_tokens`."""
    found, reach = [], NEAREST
    while reach < max_tokens:
        found.append(reach)
        reach *= FARTHER
    return (*found, max_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """The tensors that a graph of `T` tokens of one prompt reads.

    Attributes
    ----------
    block : int64, what the host gives: tokens and positions [T], for each tier slots [T] and a row
        of the page table, then how many of the tokens are somebody's, the request's length and the
        index of the last of them
    tokens, positions : int64 [1, T], of the block
    last : int64 [1], of the block: the token that has a next one
    batch : the request
    """

    block: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    last: torch.Tensor
    batch: Batch

    @classmethod
    def of(
        cls,
        num_tokens: int,
        reach: int,
        plan: PoolPlan,
        usual_requests: int | None,
        device: torch.device,
    ) -> Chunk:
        """A chunk that is nobody's."""
        columns = pages_for_tokens(reach, plan.page_tokens)
        block = torch.from_numpy(nobodys(num_tokens, columns, len(plan.tiers))).to(device)
        tokens, positions, tiers, numbers = _parts(block, num_tokens, columns)
        tables = {
            tier.name: Table(
                torch.full((1, columns), NO_PAGE, dtype=torch.int32, device=device), slots
            )
            for tier, (slots, _) in zip(plan.tiers, tiers, strict=True)
        }
        offsets, lengths = (torch.zeros(n, dtype=torch.int32, device=device) for n in (2, 1))
        batch = Batch(offsets, lengths, tables, plan.page_tokens, usual_requests=usual_requests)
        return cls(block, tokens[None], positions[None], numbers[2:], batch)

    def read_block(self) -> None:
        """Bring lengths and page tables up to date; a part of the graph."""
        columns = next(iter(self.batch.tables.values())).page_table.shape[1]
        _, _, tiers, numbers = _parts(self.block, self.tokens.shape[1], columns)
        self.batch.query_offsets[1:].copy_(numbers[:1])
        self.batch.seq_lens.copy_(numbers[1:2])
        for table, (_, row) in zip(self.batch.tables.values(), tiers, strict=True):
            table.page_table[0].copy_(row)


def nobodys(num_tokens: int, columns: int, tiers: int) -> npt.NDArray[np.int64]:
    """The block when no token is anybody's."""
    block = np.zeros(num_tokens * 2 + tiers * (num_tokens + columns) + 3, np.int64)
    for slots, row in _parts(block, num_tokens, columns)[2]:
        slots[:], row[:] = NO_SLOT, NO_PAGE
    return block


def _parts(block: Any, num_tokens: int, columns: int) -> tuple[Any, Any, list[Any], Any]:
    """Tokens, positions, slots and row of each tier, and the three numbers."""
    tokens, positions = block[:num_tokens], block[num_tokens : 2 * num_tokens]
    tiers = []
    for at in range(2 * num_tokens, len(block) - 3, num_tokens + columns):
        row = at + num_tokens
        tiers.append((block[at:row], block[row : row + columns]))
    return tokens, positions, tiers, block[-3:]


class _Graph:
    """A graph and the tensors that it reads."""

    def __init__(self, run: Run, capture: Capture, chunk: Chunk) -> None:
        self._chunk = chunk

        def once() -> torch.Tensor:
            chunk.read_block()
            return run(chunk)

        self.replay, self._logits = capture(once)
        self._columns = next(iter(chunk.batch.tables.values())).page_table.shape[1]

    @property
    def tokens(self) -> torch.Tensor:
        """Of the chunk [1, T]."""
        return self._chunk.tokens

    def compute(self, request: Request, count: int) -> torch.Tensor:
        """Logits [1, vocabulary] of the last of the request's next `count` tokens."""
        on_gpu = self._chunk.block.device.type == "cuda"
        # A new one each time: torch keeps one from being used again until it is copied.
        host = torch.empty(self._chunk.block.shape, dtype=torch.int64, pin_memory=on_gpu)
        self._fill(host.numpy(), request, count)
        self._chunk.block.copy_(host, non_blocking=True)
        self.replay()
        return self._logits

    def _fill(self, block: npt.NDArray[np.int64], request: Request, count: int) -> None:
        pages, start = request.pages, request.num_computed
        assert pages is not None
        size = self._chunk.tokens.shape[1]
        tokens, positions, tiers, numbers = _parts(block, size, self._columns)
        tokens[:count], tokens[count:] = request.step_tokens(count), 0
        positions[:count], positions[count:] = np.arange(start, start + count), 0
        for tier, (slots, row) in zip(self._chunk.batch.tables, tiers, strict=True):
            held = pages.tables[tier]
            slots[:count], slots[count:] = pages.slots(tier, start, start + count), NO_SLOT
            row[: len(held)], row[len(held) :] = held, NO_PAGE
        numbers[:] = count, start + count, count - 1


class PromptGraphs:
    """Graphs for chunks of up to `most` tokens; made when first needed, or all by `prepare`."""

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
        """`run`: the model over a `Chunk`; `max_tokens`: of the longest request.

        `usual_requests`: see `Batch.usual_requests`.
        """
        self._run, self._plan, self._capture = run, plan, capture
        self._sizes, self._reaches = sizes(min(most, max_tokens)), reaches(max_tokens)
        self._usual_requests, self._device = usual_requests, device
        self.making: Making[tuple[int, int, Route | None], _Graph] = Making("prompts")

    def narrow(
        self, seconds: Callable[[Callable[[], object]], float], vocabulary: int
    ) -> int | None:
        """Leave out chunks that a graph makes slower: of how many tokens those are that stay.

        None: all stay, or no graph can be made. A chunk is padded to the next size. To replay that
        takes no longer than to compute the size before it where the host takes longer to launch a
        step than the device to compute it, or the device as long to read the weights; the others'
        time is the device's.

        `seconds`: that a call takes until the device is done; `vocabulary`: of the model, of whose
        tokens a chunk has many, as experts are chosen by them
        """
        reach = self._reaches[0]

        def slower(size: int) -> bool:
            graph = self._graph(size, reach, None)
            if graph is None:
                return False  # nor can another be made
            chunk = self._chunk(self._sizes[max(0, self._sizes.index(size) - 1)], reach)
            for tokens in (graph.tokens[0], chunk.tokens[0]):
                tokens.copy_(torch.arange(len(tokens)) % vocabulary)
            return seconds(graph.replay) > AS_LONG * seconds(lambda: self._run(chunk))

        *fewer, most = self._sizes
        if not slower(most):
            return None
        stay = bisect_left(fewer, True, key=slower)
        if self.making.failed:
            return None
        graphs = self.making.graphs
        for key in [key for key in graphs if key[0] not in self._sizes[:stay]]:
            del graphs[key]
        self._sizes = self._sizes[:stay]
        return self._sizes[-1] if stay else 0

    def prepare(self) -> int:
        """Make all of them, the largest first, into whose memory the others fit; how many."""
        for reach, size in product(reversed(self._reaches), reversed(self._sizes)):
            self._graph(size, reach, None)
        return len(self.making.graphs)

    def compute(
        self, request: Request, count: int, route: Route | None = None
    ) -> torch.Tensor | None:
        """Logits [1, vocabulary] of the last of the next `count` tokens, 1 … `most`.

        They last until the next call. None: no graph can be made. `route`: by which all graphs of
        it read their past; what it raises where that refuses is raised.
        """
        graph = self._graph(*self._key(count, request.num_computed, route))
        return None if graph is None else graph.compute(request, count)

    def has(self, count: int, past: int, route: Route | None = None) -> bool:
        """Whether a graph for so many tokens behind so many is there, or may be made."""
        return self.making.has(self._key(count, past, route))

    def _key(self, count: int, past: int, route: Route | None) -> tuple[int, int, Route | None]:
        size = self._sizes[bisect_left(self._sizes, count)]
        return size, self._reaches[bisect_left(self._reaches, past + count)], route

    def _graph(self, size: int, reach: int, route: Route | None) -> _Graph | None:
        return self.making.get(
            (size, reach, route),
            lambda: _Graph(self._run, self._capture, self._chunk(size, reach)),
        )

    def _chunk(self, size: int, reach: int) -> Chunk:
        return Chunk.of(size, reach, self._plan, self._usual_requests, self._device)
