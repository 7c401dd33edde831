"""The serving loop: schedule, compute, sample, deliver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvq_cli.engine.detokenize import Detokenizer
from kvq_cli.engine.params import (
    Delta,
    EngineStats,
    FinishReason,
    RequestRejected,
    SamplingParams,
)
from kvq_cli.engine.request import Request
from kvq_cli.engine.runner import ModelRunner
from kvq_cli.engine.sampling import make_generator, sample
from kvq_cli.engine.scheduler import Schedule, Scheduler
from kvq_pools import CacheSpace

# Tokens of the prompt that the first generated token's text may join to.
DETOKENIZER_CONTEXT = 8


class Engine:
    """Requests in, tokens out. Single-threaded: one owner calls add, cancel and step."""

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Any,
        *,
        max_model_len: int,
        max_running_requests: int,
        max_prefill_tokens: int,
    ) -> None:
        self.runner = runner
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.space = CacheSpace(runner.pool.plan, runner.pool.num_pages)
        self.scheduler = Scheduler(
            self.space,
            max_running_requests=max_running_requests,
            max_prefill_tokens=max_prefill_tokens,
        )
        self._requests: dict[str, Request] = {}
        self._prompt_tokens_total = 0
        self._generation_tokens_total = 0
        self._finished_total: Counter[str] = Counter()
        self._steps_total = 0

    def check(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Most tokens the request may reach; `RequestRejected` when it can never be served."""
        vocabulary = self.runner.geometry.vocab_size
        if not prompt:
            raise RequestRejected("the prompt is empty; give at least one token")
        if bad := [t for t in prompt if not 0 <= t < vocabulary]:
            raise RequestRejected(
                f"token id {bad[0]} is outside the model's vocabulary of {vocabulary}"
            )
        wanted = params.max_tokens
        if len(prompt) >= self.max_model_len or len(prompt) + (wanted or 1) > self.max_model_len:
            asked = f" and {wanted} to generate" if wanted is not None else ""
            raise RequestRejected(
                f"{len(prompt)} prompt tokens{asked} exceed the context of {self.max_model_len} "
                "tokens (prompt and generated together); shorten the prompt, lower max_tokens, "
                "or serve with a larger --max-model-len"
            )
        return self.max_model_len if wanted is None else len(prompt) + wanted

    def add(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        """Queue a request; its deltas come out of `step` under `request_id`."""
        request = Request(
            request_id=request_id,
            tokens=list(prompt),
            params=params,
            prompt_tokens=len(prompt),
            max_total_tokens=self.check(prompt, params),
            detokenizer=Detokenizer(self.tokenizer, params.stop, prompt[-DETOKENIZER_CONTEXT:]),
            generator=make_generator(params),
        )
        self._requests[request_id] = request
        self._prompt_tokens_total += len(prompt)
        self.scheduler.add(request)

    def cancel(self, request_id: str) -> None:
        """Drop a request and free its pages; unknown or finished ids are no error."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, "abort")

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests)

    def step(self) -> list[tuple[str, Delta]]:
        """Compute one step; returns what it added, as (request id, delta)."""
        step = self.scheduler.schedule()
        if not step:
            if self.has_work:
                raise RuntimeError(
                    f"{len(self._requests)} requests wait and none can be scheduled: page "
                    f"accounting is wrong ({self.stats()})"
                )
            return []
        logits = self.runner.forward(step)
        requests = self._advance(step)
        rows = [row for row, request in enumerate(requests) if request.decoding]
        ready = [requests[row] for row in rows]
        tokens = sample(logits[rows], ready) if rows else []
        self._steps_total += 1
        return [self._deliver(*pair) for pair in zip(ready, tokens, strict=True)]

    def _advance(self, step: Schedule) -> list[Request]:
        """Move each request past what the step computed: [num_computed, + count) is cached now."""
        work = [*((request, 1) for request in step.decodes), *step.extends]
        for request, count in work:
            assert request.pages is not None
            request.num_computed += count
            request.pages.advance(request.num_computed)
        return [request for request, _ in work]

    def _deliver(self, request: Request, token: int) -> tuple[str, Delta]:
        request.tokens.append(token)
        self._generation_tokens_total += 1
        ended = token in self.runner.geometry.eos_token_ids and not request.params.ignore_eos
        text = request.detokenizer.push(token)
        reason: FinishReason | None = None
        if ended or request.detokenizer.stopped:
            reason = "stop"
        elif len(request.tokens) >= request.max_total_tokens:
            reason = "length"
        if reason is not None:
            text += request.detokenizer.finish()
            self._end(request, reason)
        return request.request_id, Delta(text, (token,), reason)

    def _end(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        del self._requests[request.request_id]
        self._finished_total[reason] += 1
        self.scheduler.remove(request)

    def stats(self) -> EngineStats:
        """Counters and gauges; consistent when the owner calls it between steps."""
        pool = self.runner.pool
        tiers = [tier.name for tier in pool.plan.tiers]
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            pages_total={name: pool.pages(name) for name in tiers},
            pages_free={name: self.space.num_free(name) for name in tiers},
            prompt_tokens_total=self._prompt_tokens_total,
            generation_tokens_total=self._generation_tokens_total,
            requests_finished_total=dict(self._finished_total),
            steps_total=self._steps_total,
        )
