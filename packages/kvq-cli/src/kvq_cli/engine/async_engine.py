"""The engine behind an event loop: one worker thread steps, coroutines wait for their deltas."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Literal

from kvq_cli.engine.engine import Engine
from kvq_cli.engine.params import (
    Delta,
    EngineFailed,
    EngineStats,
    EngineSummary,
    RebuildBusy,
    RebuildReport,
    RequestFailed,
    RequestRejected,
    SamplingParams,
    merged,
)
from kvq_pools import RebuildFailed, RebuildRejected

logger = logging.getLogger(__name__)


State = Literal["ready", "rebuilding", "failed"]


class RequestHandle:
    """One submitted request: iterate over its deltas, or cancel it."""

    def __init__(self, engine: AsyncEngine, request_id: str, prompt_tokens: int) -> None:
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        self.completion_tokens = 0
        self._engine = engine
        self._deltas: list[Delta] = []  # that nobody has read
        self._error: EngineFailed | RequestFailed | RequestRejected | None = None
        self._news = asyncio.Event()
        self._done = False

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """What came since the last one, as one delta: a slow reader gets fewer and longer ones."""
        while not self._done:
            await self._news.wait()
            self._news.clear()
            deltas, self._deltas = self._deltas, []
            if deltas:
                self._done = deltas[-1].finish_reason is not None
                yield merged(deltas)
            if self._error is not None:
                self._done = True
                raise self._error

    def cancel(self) -> None:
        """Stop generating and give the request's pages back; harmless when it has ended."""
        self._engine._cancel(self)

    def _put(self, delta: Delta | EngineFailed | RequestRejected) -> None:
        if not isinstance(delta, Delta):
            self._error = delta
        elif delta.finish_reason == "error":
            self._error = RequestFailed(delta.error)
        else:
            self.completion_tokens += len(delta.token_ids)
            self.cached_tokens = delta.cached_tokens or self.cached_tokens
            self._deltas.append(delta)
        self._news.set()


class AsyncEngine:
    """An `Engine` owned by a worker thread.

    The event loop sends commands through an inbox that the worker empties between steps; the
    worker answers with `call_soon_threadsafe` and publishes snapshots. Nothing else is shared.
    """

    def __init__(self, engine: Engine, summarize: Callable[[Engine], EngineSummary]) -> None:
        """`summarize`: what is said of the engine; asked again after each rebuild."""
        self.tokenizer: Any = engine.tokenizer
        self.max_running_requests = engine.scheduler.max_running_requests
        self.failure: str | None = None
        self._engine = engine
        self._summarize = summarize
        self._snapshot = summarize(engine), engine.stats()
        self._inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._handles: dict[str, RequestHandle] = {}  # event loop's
        self._rebuild: asyncio.Future[RebuildReport] | None = None  # event loop's
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopped = False

    @property
    def healthy(self) -> bool:
        """Whether requests can be served."""
        thread = self._thread
        return self.failure is None and not self._stopped and bool(thread and thread.is_alive())

    @property
    def state(self) -> State:
        """What the engine does with requests: serves them, lets them wait a moment, fails."""
        if not self.healthy:
            return "failed"
        return "ready" if self._rebuild is None else "rebuilding"

    @property
    def snapshot(self) -> tuple[EngineSummary, EngineStats]:
        """The engine after its last step or rebuild; both parts are of the same moment."""
        return self._snapshot

    @property
    def summary(self) -> EngineSummary:
        """What is said of the engine now."""
        return self._snapshot[0]

    def stats(self) -> EngineStats:
        """The state after the last step."""
        return self._snapshot[1]

    @property
    def model_name(self) -> str:
        """The name that requests give."""
        return self.summary.model_name

    @property
    def max_model_len(self) -> int:
        """Longest request now (tokens, prompt and generated together)."""
        return self.summary.max_model_len

    def start(self) -> None:
        """Start the worker; call on the event loop that will submit."""
        if self._thread is not None:
            raise RuntimeError("the engine was started already")
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name="kvq-engine", daemon=True)
        self._thread.start()

    async def stop(self, patience: float | None = None) -> None:
        """End requests in flight with `abort`, and the worker after its current step.

        A step may take long: it is awaited for at most `patience` seconds; None = to its end.
        """
        if self._thread is None or self._stopped:
            return
        self._stopped = True
        self._inbox.put(("stop", None))
        for handle in list(self._handles.values()):
            self._finish(handle, Delta("", (), "abort"))
        self._rebuilt(EngineFailed("it is stopping"))
        await asyncio.to_thread(self._thread.join, patience)

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> RequestHandle:
        """Queue a request; `RequestRejected` when it can never be served.

        A rebuild that is under way may make the cache too small for it: then its handle raises
        `RequestRejected`. When computing it goes wrong, its handle raises `RequestFailed`.
        """
        return self.submit_choices(prompt, params, 1)[0]

    def submit_choices(
        self, prompt: Sequence[int], params: SamplingParams, count: int
    ) -> list[RequestHandle]:
        """`submit`, for `count` answers to one prompt, which is computed once."""
        self._require_healthy()
        self._engine.check(prompt, params)  # reads numbers that the worker may replace
        handles = [RequestHandle(self, uuid.uuid4().hex, len(prompt)) for _ in range(count)]
        self._handles |= {handle.request_id: handle for handle in handles}
        ids = [handle.request_id for handle in handles]
        self._inbox.put(("add", (ids, list(prompt), params)))
        return handles

    async def rebuild(
        self, num_tokens: int | None = None, cache_dtype: str | None = None
    ) -> RebuildReport:
        """Resize or reformat the cache after the current step; `Engine.rebuild` says how.

        It runs to its end whether or not the caller waits.

        Raises
        ------
        RebuildBusy, RebuildRejected, RebuildFailed : the engine serves on as before
        EngineFailed : it does not
        """
        self._require_healthy()
        if self._rebuild is not None:
            raise RebuildBusy("another rebuild runs; ask again when it is done")
        self._rebuild = asyncio.get_running_loop().create_future()
        self._inbox.put(("rebuild", (num_tokens, cache_dtype)))
        return await asyncio.shield(self._rebuild)

    def _require_healthy(self) -> None:
        if not self.healthy:
            raise EngineFailed(self.failure or "it is not running")

    def _cancel(self, handle: RequestHandle) -> None:
        if self._handles.get(handle.request_id) is handle:
            self._inbox.put(("cancel", handle.request_id))
            self._finish(handle, Delta("", (), "abort"))

    def _finish(self, handle: RequestHandle, last: Delta | EngineFailed | RequestRejected) -> None:
        self._handles.pop(handle.request_id, None)
        handle._put(last)

    # ---- worker thread ------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while self._obey():
                deltas = self._engine.step()
                self._publish()
                if deltas:
                    self._call(self._deliver, deltas)
        except Exception as error:  # the worker's boundary: whatever broke, waiters must hear of it
            logger.exception("the engine stopped on an error")
            self.failure = f"{type(error).__name__}: {error}"
            self._call(self._fail)

    def _obey(self) -> bool:
        """Carry out what is in the inbox, waiting while there is no work; False = stop."""
        while True:
            try:
                verb, argument = self._inbox.get(block=not self._engine.has_work)
            except queue.Empty:
                return True
            match verb:
                case "stop":
                    return False
                case "add":
                    self._add(*argument)
                case "cancel":
                    self._engine.cancel(argument)
                case "rebuild":
                    self._rebuild_now(*argument)
            self._publish()

    def _add(self, ids: list[str], prompt: list[int], params: SamplingParams) -> None:
        try:
            self._engine.add(ids[0], prompt, params, ids[1:])
        except RequestRejected as error:  # it fitted when it was submitted
            for request_id in ids:
                self._call(self._refuse, request_id, error)

    def _rebuild_now(self, num_tokens: int | None, cache_dtype: str | None) -> None:
        try:
            outcome: RebuildReport | Exception = self._engine.rebuild(num_tokens, cache_dtype)
        except (RebuildRejected, RebuildFailed) as error:
            outcome = error
        self._publish()  # before the caller hears of it
        self._call(self._rebuilt, outcome)

    def _publish(self) -> None:
        summary = self.summary
        stats = self._engine.stats()
        if stats.last_rebuild is not self._snapshot[1].last_rebuild:
            summary = self._summarize(self._engine)
        self._snapshot = summary, stats

    def _call(self, function: Any, *arguments: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop closed first: nobody is left to hear it
            logger.debug("event loop closed before a delta was delivered")

    # ---- event loop, called by the worker -----------------------------------------------------

    def _deliver(self, deltas: list[tuple[str, Delta]]) -> None:
        for request_id, delta in deltas:
            handle = self._handles.get(request_id)
            if handle is None:  # cancelled while the step ran
                continue
            if delta.finish_reason is None:
                handle._put(delta)
            else:
                self._finish(handle, delta)

    def _refuse(self, request_id: str, error: RequestRejected) -> None:
        if request_id in self._handles:
            self._finish(self._handles[request_id], error)

    def _rebuilt(self, outcome: RebuildReport | Exception) -> None:
        future, self._rebuild = self._rebuild, None
        if future is None:
            return
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _fail(self) -> None:
        for handle in list(self._handles.values()):
            self._finish(handle, EngineFailed(self.failure))
        self._rebuilt(EngineFailed(self.failure))
