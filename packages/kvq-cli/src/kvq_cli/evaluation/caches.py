"""A model over a cache of one format, fed with tokens that are known beforehand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import kvq_codecs
from kvq_cli.config import ModelGeometry, pages_per_request
from kvq_cli.engine.cache import CacheChoice
from kvq_cli.engine.detokenize import Detokenizer
from kvq_cli.engine.params import SamplingParams
from kvq_cli.engine.request import Request
from kvq_cli.engine.runner import ModelRunner
from kvq_cli.engine.scheduler import Schedule
from kvq_cli.engine.states import StatePool
from kvq_pools import CacheSpace, Pool, SequencePages


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of a sequence that were computed in one step; valid until the next.

    Attributes
    ----------
    start, stop : their positions
    logits : [stop - start, vocabulary]
    """

    start: int
    stop: int
    logits: torch.Tensor
    _pool: Pool
    _pages: SequencePages

    def rows(self, side: str, layer: int) -> torch.Tensor:
        """What the cache holds of them now: rows [tokens, heads, dim] of side "k" or "v"."""
        plan, cache = self._pool.plan, self._pool.view(side, layer)
        slots = torch.from_numpy(
            self._pages.slots(plan.tier_of(layer).name, self.start, self.stop)
        ).to(self.logits.device)
        page, offset = slots // plan.page_tokens, slots % plan.page_tokens
        stored = cache.map(lambda plane: plane[page, :, offset])
        rows: torch.Tensor = kvq_codecs.get(cache.spec.name).decode(stored)
        return rows


class FormatCache:
    """A pool in one format, and the model that reads and writes it as a server's engine does.

    Each chunk is stored first and read as later tokens will read it, so that a token sees of all
    before it what a long chat would.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        shape: ModelGeometry,
        choice: CacheChoice,
        *,
        chunk_tokens: int,
        capacity: Sequence[int],
    ) -> None:
        """`capacity`: lengths of the sequences that it must hold at the same time."""
        self.tokenizer = tokenizer
        self.chunk_tokens = chunk_tokens
        device, dtype = next((p.device, p.dtype) for p in model.parameters())
        num_pages = sum(
            pages_per_request(
                shape,
                length,
                page_tokens=choice.plan.page_tokens,
                max_prefill_tokens=chunk_tokens,
            )
            for length in capacity
        )
        self.pool = Pool(
            choice.plan,
            num_pages,
            empty=lambda shape, kind: torch.empty(shape, dtype=getattr(torch, kind), device=device),
            to_host=lambda array: array.to("cpu", copy=True),
        )
        self.space = CacheSpace(choice.plan, num_pages)
        states = None
        if shape.state is not None:
            states = StatePool(shape.state, len(capacity), device=device, dtype=dtype)
        self.runner = ModelRunner(
            model,
            shape,
            self.pool,
            backends=choice.backends,
            prefill_reads="packed",
            states=states,
        )

    def forced(self, tokens: Sequence[int], wanted: int = 0) -> Iterator[Chunk]:
        """The logits of known tokens from position `wanted` on, a chunk at a time."""
        request = self._open(tokens)
        assert request.pages is not None
        try:
            for start in range(0, len(tokens), self.chunk_tokens):
                stop = min(start + self.chunk_tokens, len(tokens))
                request.pages.grow(stop)
                step = Schedule(extends=[(request, stop - start)])
                # a model's head may cost more than its layers: not for what nobody reads
                logits = self.runner.forward(step, every_token=stop > wanted)
                if stop > wanted:
                    yield Chunk(start, stop, logits, self.pool, request.pages)
                self._advance(request, stop)
                self.runner.settle()
        finally:
            self._close(request)

    def tail(self, tokens: Sequence[int], count: int) -> torch.Tensor:
        """Logits [count, vocabulary] that predict the last `count` of known tokens."""
        first = len(tokens) - count - 1  # a prediction is made at the token before
        kept = [chunk.logits[max(0, first - chunk.start) :] for chunk in self.forced(tokens, first)]
        return torch.cat(kept)[:count]

    def greedy(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """The `count` tokens that greedy decoding appends to each prompt, decoded together."""
        requests = [self._open(prompt) for prompt in prompts]
        try:
            for request in requests:
                self._prefill(request)
            for _ in range(count - 1):
                for request in requests:
                    assert request.pages is not None
                    request.pages.grow(len(request.tokens))
                chosen = self.runner.forward(Schedule(decodes=requests)).argmax(-1).tolist()
                for request, token in zip(requests, chosen, strict=True):
                    self._advance(request, len(request.tokens))
                    request.tokens.append(token)
                self.runner.settle()
            return [request.tokens[request.prompt_tokens :] for request in requests]
        finally:
            for request in requests:
                self._close(request)

    def _prefill(self, request: Request) -> None:
        """Compute a prompt and append the token that follows."""
        assert request.pages is not None
        for start in range(0, request.prompt_tokens, self.chunk_tokens):
            stop = min(start + self.chunk_tokens, request.prompt_tokens)
            request.pages.grow(stop)
            logits = self.runner.forward(Schedule(extends=[(request, stop - start)]))
            self._advance(request, stop)
            self.runner.settle()
        request.tokens.append(int(logits[0].argmax()))

    def _open(self, tokens: Sequence[int]) -> Request:
        return Request(
            request_id="evaluated",
            tokens=list(tokens),
            params=SamplingParams(temperature=0.0),
            prompt_tokens=len(tokens),
            max_total_tokens=None,
            detokenizer=Detokenizer(self.tokenizer),
            pages=self.space.open(),
        )

    @staticmethod
    def _close(request: Request) -> None:
        """Give its pages back, and with them its state if it has one."""
        if request.pages is not None:
            request.pages.close()
            request.pages = None

    @staticmethod
    def _advance(request: Request, num_computed: int) -> None:
        assert request.pages is not None
        request.num_computed = num_computed
        request.pages.advance(num_computed)
