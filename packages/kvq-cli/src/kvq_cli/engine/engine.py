"""The serving loop: schedule, compute, sample, deliver."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from itertools import count
from typing import Any

from kvq_attention import launches
from kvq_cli.engine.cache import LiveCache
from kvq_cli.engine.computing import Computing
from kvq_cli.engine.detokenize import Detokenizer
from kvq_cli.engine.params import (
    CacheSize,
    Delta,
    EngineStats,
    FinishReason,
    RebuildReport,
    RequestRejected,
    SamplingParams,
    TokenLogprobs,
)
from kvq_cli.engine.request import Request
from kvq_cli.engine.runner import ModelRunner
from kvq_cli.engine.sampling import draw_key
from kvq_cli.engine.scheduler import Schedule, Scheduler
from kvq_pools import RebuildFailed

logger = logging.getLogger(__name__)

# Tokens of the prompt that the first generated token's text may join to.
DETOKENIZER_CONTEXT = 8


class Engine:
    """Requests in, tokens out. Single-threaded: one owner calls add, cancel, step and rebuild.

    Attributes
    ----------
    context_tokens : longest request that model and user allow
    max_model_len : longest request, by that and by the cache (tokens, prompt and generated)
    """

    def __init__(
        self,
        runner: ModelRunner,
        cache: LiveCache,
        tokenizer: Any,
        *,
        context_tokens: int,
        max_running_requests: int,
    ) -> None:
        self.runner = runner
        self.cache = cache
        self.tokenizer = tokenizer
        self.context_tokens = context_tokens
        self.max_model_len = runner.max_tokens = self._longest()
        self.scheduler = Scheduler(
            cache.space,
            max_running_requests=max_running_requests,
            max_prefill_tokens=cache.step_tokens,
        )
        self.computing = Computing(runner, self.scheduler, self._most_tokens)
        self._requests: dict[str, Request] = {}
        self._arrivals = count()
        self._prompt_tokens_total = 0
        self._generation_tokens_total = 0
        self._finished_total: Counter[str] = Counter()
        self._steps_total = 0
        self._last_rebuild: RebuildReport | None = None
        self._routes_before = launches.routes()

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raise `RequestRejected` when the request can never be served; safe beside the owner."""
        vocabulary = self.runner.geometry.vocab_size
        if not prompt:
            raise RequestRejected("the prompt is empty; give at least one token")
        if bad := [t for t in prompt if not 0 <= t < vocabulary]:
            raise RequestRejected(
                f"token id {bad[0]} is outside the model's vocabulary of {vocabulary}"
            )
        if bad := [t for t, _ in params.logit_bias if not 0 <= t < vocabulary]:
            raise RequestRejected(
                f"logit_bias names token id {bad[0]}; it is outside the model's vocabulary of "
                f"{vocabulary}",
                "logit_bias",
            )
        wanted, longest = params.max_tokens, self.max_model_len
        if len(prompt) + (wanted or 1) > longest:
            asked = f" and {wanted} to generate" if wanted is not None else ""
            made_for = self.runner.geometry.max_position
            limit, cure = "context", f"use a model made for more than {made_for} positions"
            if longest < made_for:
                cure = "serve with a larger --max-model-len"
            if longest < self.context_tokens:
                limit, cure = "cache", "make the cache larger (kvq ctl cache --tokens)"
                if longest < self.cache.num_tokens:
                    limit = "memory for computing"
            raise RequestRejected(
                f"{len(prompt)} prompt token{'s' * (len(prompt) != 1)}{asked} exceed the {limit} "
                f"of {longest} tokens (prompt and generated together); shorten the prompt, lower "
                f"max_tokens, or {cure}"
            )

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        twins: Sequence[str] = (),
    ) -> None:
        """Queue a request; its deltas come out of `step` under `request_id`.

        `twins`: ids of further choices, which draw for themselves and share the prompt's pages.
        """
        self.check(prompt, params)
        limit = None if params.max_tokens is None else len(prompt) + params.max_tokens
        tokens = list(prompt)
        first, *others = [
            Request(
                request_id=name,
                tokens=tokens,
                params=params,
                prompt_tokens=len(prompt),
                max_total_tokens=limit,
                detokenizer=Detokenizer(self.tokenizer, params.stop, prompt[-DETOKENIZER_CONTEXT:]),
                draw_key=draw_key(params, choice),
                arrival=next(self._arrivals),
            )
            for choice, name in enumerate([request_id, *twins])
        ]
        first.twins = others
        self._requests |= {request.request_id: request for request in (first, *others)}
        self._prompt_tokens_total += len(prompt)
        self.scheduler.add(first)

    def cancel(self, request_id: str) -> None:
        """Drop a request and give its pages back; unknown or finished ids are no error."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, "abort")

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests)

    def step(self) -> list[tuple[str, Delta]]:
        """Compute one step; returns what it added, as (request id, delta)."""
        step = self.computing.begun() or self.scheduler.schedule()
        if not step:
            if self.has_work:
                raise RuntimeError(
                    f"{len(self._requests)} requests wait and none can be scheduled: page "
                    f"accounting is wrong ({self.stats()})"
                )
            return []
        failed: dict[Request, str] = {}
        drawn = self.computing.tokens(step, failed)
        deltas = [self._fail(request, error) for request, error in failed.items()]
        self._advance(step)
        self._part(step)
        self._steps_total += 1
        deltas += [self._deliver(*each) for each in drawn if each[0].pages is not None]
        return deltas

    def _most_tokens(self, request: Request) -> int:
        return request.max_total_tokens or self.max_model_len

    def _advance(self, step: Schedule) -> None:
        """Move each request past what the step computed: [num_computed, + count) is cached now."""
        done = [each for each in step.work if each[0].pages is not None]  # the others failed
        for request, tokens in done:
            request.num_computed += tokens
        self.runner.settle()
        for request, _ in done:
            assert request.pages is not None
            request.pages.advance(request.num_computed, request.tokens)
        self.scheduler.keep(step)

    def _part(self, step: Schedule) -> None:
        """Let twins go on by themselves from where their prompt is computed."""
        for request, _ in step.extends:
            if request.pages is not None and request.decoding:
                for twin in request.pending_twins:
                    twin.tokens = list(request.tokens)
                    self.scheduler.fork(request, twin)
                request.twins = []

    def _deliver(
        self, request: Request, token: int, logprobs: TokenLogprobs | None
    ) -> tuple[str, Delta]:
        request.tokens.append(token)
        self._generation_tokens_total += 1
        ended = token in self.runner.geometry.eos_token_ids and not request.params.ignore_eos
        text = request.detokenizer.push(token)
        reason: FinishReason | None = None
        if ended or request.detokenizer.stopped:
            reason = "stop"
        elif len(request.tokens) >= self._most_tokens(request):
            reason = "length"
        if reason is not None:
            text += request.detokenizer.finish()
            self._end(request, reason)
        told = () if logprobs is None or ended else (logprobs,)
        cached = request.cached_tokens or 0
        return request.request_id, Delta(text, (token,), reason, cached, told)

    def _fail(self, request: Request, error: str) -> tuple[str, Delta]:
        self._end(request, "error")
        return request.request_id, Delta("", (), "error", error=error)

    def _end(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        del self._requests[request.request_id]
        self._finished_total[reason] += 1
        self.scheduler.remove(request)
        if twins := request.pending_twins:  # the next one computes the prompt
            heir = twins[0]
            heir.twins = twins[1:]
            self.scheduler.add(heir)

    def rebuild(
        self, num_tokens: int | None = None, cache_dtype: str | None = None
    ) -> RebuildReport:
        """Resize the cache, change its format, or both, between two steps; None keeps a thing.

        What fits of the running requests' pages and of the prefix cache is kept, unless the
        format changes; requests that lose theirs are computed again.

        Raises
        ------
        RebuildRejected : it cannot be done; nothing was touched
        RebuildFailed : it went wrong; the old cache is back and serves on
        PoolFailed : that failed too; the engine cannot serve any more
        """
        choice, num_pages = self.cache.check(num_tokens, cache_dtype, self._requests.values())
        before, start = self._cache_size(), time.perf_counter()
        running = [r.pages for r in self.scheduler.running if r.pages is not None]
        self.computing.forget()
        self.runner.forget_graphs()
        try:
            rebuilt = self.cache.rebuild(choice, num_pages, running)
        except RebuildFailed as error:
            self._last_rebuild = RebuildReport(
                before=before,
                after=before,
                finished_at=time.time(),
                seconds=time.perf_counter() - start,
                requests_kept=len(running),
                error=str(error),
            )
            raise
        requeued = self.scheduler.requeue(rebuilt.dropped)
        self.runner.backends = choice.backends
        self.max_model_len = self.runner.max_tokens = self._longest()
        self._last_rebuild = RebuildReport(
            before=before,
            after=self._cache_size(),
            finished_at=time.time(),
            seconds=time.perf_counter() - start,
            requests_kept=len(running) - requeued,
            requests_requeued=requeued,
            cached_kept=dict(rebuilt.cached_kept),
            cached_dropped=dict(rebuilt.cached_dropped),
        )
        return self._last_rebuild

    def _longest(self) -> int:
        fits = self.cache.max_tokens
        return self.context_tokens if fits is None else min(self.context_tokens, fits)

    def _cache_size(self) -> CacheSize:
        return CacheSize(
            cache_dtype=self.cache.choice.cache_dtype,
            num_tokens=self.cache.num_tokens,
            nbytes=self.cache.pool.nbytes,
            bytes_per_token=self.cache.pool.plan.token_bytes,
            max_model_len=self.max_model_len,
            attention=self.cache.choice.backends.by_op(),
        )

    def stats(self) -> EngineStats:
        """Counters and gauges; consistent when the owner calls it between steps."""
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self._requests) - len(self.scheduler.running),
            tiers=self.cache.tiers(),
            prefix=self.cache.space.stats(),
            prompt_tokens_total=self._prompt_tokens_total,
            generation_tokens_total=self._generation_tokens_total,
            requests_finished_total=dict(self._finished_total),
            steps_total=self._steps_total,
            extend_routes=self._extend_routes(),
            preemptions_total=self.scheduler.preemptions_total,
            snapshots=self.cache.space.snapshot_stats(),
            last_rebuild=self._last_rebuild,
        )

    def _extend_routes(self) -> dict[str, int]:
        """Launches of extends since the engine was made, by route."""
        new = Counter(launches.routes())
        new.subtract(self._routes_before)
        return {
            f"{backend}: {route}": count
            for (backend, op, route), count in sorted(new.items())
            if op == "extend" and count
        }
