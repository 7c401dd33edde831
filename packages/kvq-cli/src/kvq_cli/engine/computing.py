"""Schedules to tokens: computed, drawn, and the next step begun before they are read."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable

from kvq_cli.engine.params import TokenLogprobs
from kvq_cli.engine.request import Request
from kvq_cli.engine.runner import ModelRunner
from kvq_cli.engine.sampling import NO_TOKEN, Drawn, Sampled, draw
from kvq_cli.engine.scheduler import Schedule, Scheduler
from kvq_pools import OutOfPages

logger = logging.getLogger(__name__)

Token = tuple[Request, int, TokenLogprobs | None]


class Computing:
    """The steps of one engine.

    Where the same requests go on decoding, the next step is begun on the tokens that a device has
    drawn before the host has read them: the device computes while the host makes text of them.
    Where that was wrong, as a request has ended or the cache is rebuilt, nothing is lost: a
    position that is computed again gets the same rows.
    """

    def __init__(
        self, runner: ModelRunner, scheduler: Scheduler, most_tokens: Callable[[Request], int]
    ) -> None:
        """`most_tokens`: with how many a request ends."""
        self.runner = runner
        self._scheduler, self._most_tokens = scheduler, most_tokens
        self._ahead: Drawn | None = None  # of the step after the one that was read last

    def begun(self) -> Schedule | None:
        """The step that is being computed, of the requests that have not ended since."""
        if self._ahead is not None:
            going_on = [request for request in self._ahead.requests if request.pages is not None]
            if going_on:
                return Schedule(going_on)
        self.forget()
        return None

    def forget(self) -> None:
        """Compute what was begun another time."""
        self._ahead = None

    def tokens(self, step: Schedule, failed: dict[Request, str]) -> list[Token]:
        """The next token of each request that has all tokens before it, its twins' included.

        `step`: what was begun, or else a new one.

        Nothing changes but the cache at the step's own positions, so that a step that goes wrong
        is tried again a request at a time: `failed` says whose fault it was. What breaks the
        device is raised.
        """
        ahead, self._ahead = self._ahead, None
        try:
            drawn = ahead or self._draw(step)
            if drawn is None:
                return []
            self._run_ahead(step, drawn)
            sampled = drawn.read()
        except Exception as error:  # a model and its kernels may raise anything
            drawn = ahead = None
            again = self._recover(step, error, failed)
        else:
            return self._found(drawn, sampled, failed, were_begun=ahead is not None)
        return [each for part in again for each in self.tokens(part, failed)]

    def _recover(
        self, step: Schedule, error: Exception, failed: dict[Request, str]
    ) -> list[Schedule]:
        """After a step that failed: what of it to try again, in the memory that it had."""
        again = list(step.apart()) if len(step.work) > 1 else []
        if again:
            logger.exception("a step of %d requests failed; each is tried", len(step.work))
        else:
            [(request, _)] = step.work
            logger.exception("request %s failed", request.request_id)
            failed[request] = f"{type(error).__name__}: {error}"
        self.forget()
        _let_go(error)
        self.runner.recover()
        return again

    @staticmethod
    def _found(
        drawn: Drawn, sampled: Sampled, failed: dict[Request, str], *, were_begun: bool
    ) -> list[Token]:
        """What was drawn for each request that is still there; `were_begun`: a step before."""
        found = [
            each
            for each in zip(drawn.requests, sampled.tokens, sampled.logprobs, strict=True)
            if not were_begun or each[0].pages is not None
        ]
        for request, token, _ in found:
            if token == NO_TOKEN:
                logger.error("request %s: the logits are no finite numbers", request.request_id)
                failed[request] = "the model's output is not finite"
        return [each for each in found if each[1] != NO_TOKEN]

    def _draw(self, step: Schedule) -> Drawn | None:
        logits = self.runner.forward(step)
        pairs = [
            (row, each)
            for row, (request, tokens) in enumerate(step.work)
            if request.num_computed + tokens >= request.prefill_until
            for each in (request, *request.pending_twins)
        ]
        if not pairs:
            return None
        rows, ready = zip(*pairs, strict=True)
        whole = rows == tuple(range(len(logits)))
        return draw(logits if whole else logits[list(rows)], ready)

    def _run_ahead(self, step: Schedule, drawn: Drawn) -> None:
        """Begin the step after this one, if it is known to be decodes of the same requests."""
        if not self._goes_on(step):
            return
        try:
            for request in step.decodes:
                assert request.pages is not None
                request.pages.grow(request.num_computed + 2)
        except OutOfPages:
            return
        going_on = set(step.decodes)
        rows = [row for row, request in enumerate(drawn.requests) if request in going_on]
        logits = self.runner.forward_ahead(step.decodes, drawn.only(rows))
        if logits is not None:
            self._ahead = draw(logits, step.decodes, ahead=1)

    def _goes_on(self, step: Schedule) -> bool:
        """Whether nobody else is to be computed, nobody's end is known, and no draw looks back."""
        count = len(step.decodes)
        return (
            not step.extends
            and self.runner.states is None  # what is begun anew would see them twice
            and not self._scheduler.waiting
            and len(self._scheduler.running) == count <= self.runner.graph_rows
            and not any(request.params.looks_back for request in step.decodes)
            and all(len(r.tokens) + 1 < self._most_tokens(r) for r in step.decodes)
        )


def _let_go(error: BaseException | None) -> None:
    """Drop what the frames of an error hold: activations, and graphs with their memory."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
