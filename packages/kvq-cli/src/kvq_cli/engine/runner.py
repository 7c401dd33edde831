"""A schedule to logits: builds the flat tensors of a step and calls the model once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from kvq_attention import Batch, Table, UnsupportedError, ops
from kvq_attention.batch import Request as AttentionRequest
from kvq_attention.routes import DENSE, Route
from kvq_attention.support import Choice
from kvq_cli.config import ModelGeometry
from kvq_cli.engine.graphs import Capture, DecodeGraphs, OnGpu, Static
from kvq_cli.engine.prompt_graphs import PromptGraphs, sizes
from kvq_cli.engine.request import Request
from kvq_cli.engine.scheduler import Schedule
from kvq_cli.engine.states import StatePool
from kvq_cli.models.attention import StepContext
from kvq_cli.models.linear import Part
from kvq_pools import Pool

TIMES = 3  # that a step is timed


class ModelRunner:
    """A transformers model over a pool.

    With `graph_rows` steps of up to so many decodes are replayed from CUDA graphs, and with
    `graph_tokens` steps of one prompt's chunk of up to so many tokens that reads own rows.

    Attributes
    ----------
    max_tokens : longest request, for which the tables of graphs have room; the engine says it
    extend_route : by which prompts read their past, for measurements; None = as the backend of
        extends chooses
    """

    def __init__(
        self,
        model: Any,
        geometry: ModelGeometry,
        pool: Pool,
        *,
        backends: Choice,
        prefill_reads: str = "own",
        scratch_bytes: int = ops.SCRATCH_BYTES,
        graph_rows: int = 0,
        graph_tokens: int = 0,
        usual_requests: int | None = None,
        capture: Callable[[], Capture] = OnGpu,
        states: StatePool | None = None,
    ) -> None:
        """`states`: of linear-attention layers, with which no prompt is replayed; None = none.

        `usual_requests`: that run at once, see `Batch.usual_requests`; None = nobody knows.
        """
        self.model = model
        self.states = states
        self.geometry = geometry
        self.pool = pool
        self.backends = backends
        self.prefill_reads = prefill_reads
        self.scratch_bytes = scratch_bytes
        self.extend_route: Route | None = None
        self.device = next(model.parameters()).device
        self._usual_requests = usual_requests
        self.max_tokens = 0
        self._graph_rows, self._graph_tokens = graph_rows, graph_tokens
        self._not_slower: int | None = None  # tokens of prompts, replayed; None = as many as may be
        self._capture = capture
        self._captured: Capture | None = None
        self._graphs: DecodeGraphs | None = None
        self._prompts: PromptGraphs | None = None

    @property
    def graph_rows(self) -> int:
        """Most decodes of a step that is replayed from a graph; 0 = none, or not of every size."""
        broken = self._graphs is not None and self._graphs.making.failed
        return 0 if broken else self._graph_rows

    @property
    def graph_tokens(self) -> int:
        """Most tokens of a prompt's chunk that is replayed from a graph; 0 = none is."""
        most = min(self._graph_tokens, self.max_tokens)
        return most if self._not_slower is None else min(most, self._not_slower)

    @torch.inference_mode()
    def forward(self, step: Schedule, *, every_token: bool = False) -> torch.Tensor:
        """Logits [R, vocabulary] of each request's last computed token: decodes, then extends.

        Of every computed token, [T, vocabulary], on demand. They last until the next call.
        """
        logits = None if every_token else self._replayed(step)
        if logits is not None:
            return logits
        decodes = [(request, 1) for request in step.decodes]
        work = step.work
        tokens = [t for request, count in work for t in request.step_tokens(count)]
        positions = np.concatenate(
            [np.arange(r.num_computed, r.num_computed + count) for r, count in work]
        )
        counts = [count for _, count in work]
        kept = np.arange(sum(counts)) if every_token else np.cumsum(counts) - 1
        return self._call(
            self._tensor(np.asarray([tokens], np.int64)),
            self._tensor(positions[None].astype(np.int64)),
            self._tensor(kept.astype(np.int64)),
            self._batch(decodes),
            self._batch(step.extends, any_cut=self.prefill_reads == "packed"),
            self.states.begin(decodes, step.extends) if self.states is not None else (),
        )

    @torch.inference_mode()
    def forward_ahead(
        self, requests: Sequence[Request], tokens: torch.Tensor
    ) -> torch.Tensor | None:
        """Logits [R, vocabulary] of the tokens int64 [R] that follow those being computed.

        Replayed from a graph, of `graph_rows` requests at most, which have pages for them. None:
        no graph can be made.
        """
        return self._decode_graphs().compute(requests, tokens)

    def _call(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        kept: torch.Tensor,
        decode: Batch | None,
        extend: Batch | None,
        states: Sequence[Part] = (),
    ) -> torch.Tensor:
        """The model over tokens and positions [1, T]: logits of rows `kept`."""
        context = StepContext(
            pool=self.pool,
            decode=decode,
            extend=extend,
            windows=self.geometry.windows,
            backends=self.backends,
            prefill_reads=self.prefill_reads,
            scratch_bytes=self.scratch_bytes,
            extend_route=self.extend_route,
            states=states,
        )
        output = self.model(
            input_ids=tokens,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=kept,
            kvq_step=context,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _replayed(self, step: Schedule) -> torch.Tensor | None:
        """A step's logits where a graph computes it; None = none does."""
        if not step.extends and len(step.decodes) <= self._graph_rows:
            slots = self.states.begin_replayed(step.decodes) if self.states is not None else None
            if self.states is None or slots is not None:
                return self._decode_graphs().compute(step.decodes, states=slots)
        elif len(step.extends) == 1 and not step.decodes:
            [(request, count)] = step.extends
            if self.replays_prompt(count, request.num_computed):
                return self._prompt_graphs().compute(request, count, self.extend_route)
        return None

    def replays_prompt(self, count: int, past: int) -> bool:
        """Whether a step of a prompt's chunk behind so many tokens is replayed from a graph."""
        if count > self.graph_tokens:
            return False
        prompts, route = self._prompts, self.extend_route
        if prompts is not None and not prompts.has(count, past, route):
            return False
        if route is not None:  # which padding must not make take more rows
            return count in sizes(self.graph_tokens) and route.name != DENSE
        shape = self.geometry
        return not ops.extend_reads_host(
            self.backends.extend,
            queries=count,
            past=past,
            heads=shape.num_heads,
            dim=shape.head_dim,
        )

    def _capturing(self) -> Capture:
        """One for all graphs, whose memory they share."""
        if self._captured is None:
            self._captured = self._capture()
        return self._captured

    def _prompt_graphs(self) -> PromptGraphs:
        if self._prompts is None:
            self._prompts = PromptGraphs(
                lambda c: self._call(c.tokens, c.positions, c.last, None, c.batch),
                self.pool.plan,
                most=self.graph_tokens,
                max_tokens=self.max_tokens,
                usual_requests=self._usual_requests,
                device=self.device,
                capture=self._capturing(),
            )
        return self._prompts

    def _decode_graphs(self) -> DecodeGraphs:
        if self._graphs is None:
            if self.states is not None:
                self.states.reserve_replayed(self._graph_rows)
            self._graphs = DecodeGraphs(
                self._run_static,
                self.pool.plan,
                most=self._graph_rows,
                max_tokens=self.max_tokens,
                usual_requests=self._usual_requests,
                device=self.device,
                capture=self._capturing(),
            )
        return self._graphs

    def _run_static(self, static: Static) -> torch.Tensor:
        states = () if self.states is None else (self.states.static_part(static.states),)
        given = static.tokens, static.positions, static.last, static.batch, None
        return self._call(*given, states)

    @torch.inference_mode()
    def narrow_prompts(self) -> None:
        """Measure chunks of prompts: those stay among the replayed that are not slower so."""
        if not self.graph_tokens:
            return
        prompts, vocabulary = self._prompt_graphs(), self.geometry.vocab_size
        try:
            self._not_slower = prompts.narrow(self._seconds, vocabulary)
        except UnsupportedError:  # of what was asked for: whoever asked is told
            raise
        except Exception as error:  # a model and its kernels may raise anything, as memory is short
            prompts.making.fail(error)

    @torch.inference_mode()
    def prepare(self) -> tuple[int, int]:
        """Make graphs, so that few requests wait for one: how many of decodes and of prompts."""
        prompts = self._prompt_graphs().prepare() if self.graph_tokens else 0
        decodes = self._decode_graphs().prepare() if self._graph_rows else 0
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # of what was computed once to make them
        return decodes, prompts

    @torch.inference_mode()
    def _seconds(self, work: Callable[[], object]) -> float:
        """That it takes until the device is done, the quickest of some times."""
        found = []
        for _ in range(1 + TIMES):
            start = time.perf_counter()
            work()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            found.append(time.perf_counter() - start)
        return min(found[1:])

    def forget_graphs(self) -> None:
        """Before the cache changes, whose addresses graphs hold: they are made anew when needed."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # what is replayed is done with their memory
        self._graphs = self._prompts = self._captured = None
        if self.states is not None:
            self.states.forget_replayed()

    def recover(self) -> None:
        """After a forward that failed: free what it had; raises when the device is broken."""
        self.forget_graphs()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def settle(self) -> None:
        """After requests have advanced: what the step made of their states counts."""
        if self.states is not None:
            self.states.settle()

    def _batch(self, work: Sequence[tuple[Request, int]], *, any_cut: bool = False) -> Batch | None:
        if not work:
            return None
        counts = [count for _, count in work]
        ends = [request.num_computed + count for request, count in work]
        return Batch(
            query_offsets=self._tensor(np.cumsum([0, *counts]).astype(np.int32)),
            seq_lens=self._tensor(np.asarray(ends, np.int32)),
            tables={tier.name: self._table(tier.name, work) for tier in self.pool.plan.tiers},
            page_tokens=self.pool.plan.page_tokens,
            any_cut=any_cut,
            usual_requests=self._usual_requests,
            host=tuple(
                AttentionRequest(index, stop - count, stop, length)
                for index, (count, stop, length) in enumerate(
                    zip(counts, accumulate(counts), ends, strict=True)
                )
            ),
        )

    def _table(self, tier: str, work: Sequence[tuple[Request, int]]) -> Table:
        sequences = [(r.pages, r.num_computed, r.num_computed + n) for r, n in work]
        rows = [pages.tables[tier] for pages, _, _ in sequences if pages is not None]
        table = np.full((len(rows), max(map(len, rows))), -1, np.int32)
        for row, pages in zip(table, rows, strict=True):
            row[: len(pages)] = pages
        slots = [p.slots(tier, start, stop) for p, start, stop in sequences if p is not None]
        return Table(
            page_table=self._tensor(table), slot_mapping=self._tensor(np.concatenate(slots))
        )

    def _tensor(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)
