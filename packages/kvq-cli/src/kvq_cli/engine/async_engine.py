"""The engine behind an event loop: one worker thread steps, coroutines wait for their deltas."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvq_cli.engine.engine import Engine
from kvq_cli.engine.params import Delta, EngineFailed, EngineStats, SamplingParams

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineSummary:
    """What a start-up message, a status page or a metric says of the engine.

    Attributes
    ----------
    bytes_per_token, bf16_bytes_per_token : KV bytes of one token in the tiers that grow
    num_tokens : tokens that fit at the same time
    notes : what the user should know before trusting the answers
    """

    model_name: str
    cache_dtype: str
    bytes_per_token: float
    bf16_bytes_per_token: float
    num_tokens: int
    max_model_len: int
    cache_bytes: int
    backend: str
    notes: tuple[str, ...] = ()


class RequestHandle:
    """One submitted request: iterate over its deltas, or cancel it."""

    def __init__(self, engine: AsyncEngine, request_id: str, prompt_tokens: int) -> None:
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self._engine = engine
        self._deltas: asyncio.Queue[Delta | EngineFailed] = asyncio.Queue()
        self._done = False

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while not self._done:
            delta = await self._deltas.get()
            if isinstance(delta, EngineFailed):
                self._done = True
                raise delta
            self._done = delta.finish_reason is not None
            yield delta

    def cancel(self) -> None:
        """Stop generating and free the request's pages; harmless when it has ended."""
        self._engine._cancel(self)

    def _put(self, delta: Delta | EngineFailed) -> None:
        if isinstance(delta, Delta):
            self.completion_tokens += len(delta.token_ids)
        self._deltas.put_nowait(delta)


class AsyncEngine:
    """An `Engine` owned by a worker thread.

    The event loop sends commands through an inbox that the worker empties between steps; the
    worker sends deltas back with `call_soon_threadsafe`. Nothing else is shared.
    """

    def __init__(self, engine: Engine, summary: EngineSummary) -> None:
        self.summary = summary
        self.model_name = summary.model_name
        self.tokenizer: Any = engine.tokenizer
        self.max_model_len = engine.max_model_len
        self.failure: str | None = None
        self._engine = engine
        self._inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._handles: dict[str, RequestHandle] = {}  # event loop's
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stats = engine.stats()

    @property
    def healthy(self) -> bool:
        """Whether requests can be served."""
        return self.failure is None and self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the worker; call on the event loop that will submit."""
        if self._thread is not None:
            raise RuntimeError("the engine was started already")
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name="kvq-engine", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """End the worker after its current step; requests in flight end with `abort`."""
        if self._thread is None:
            return
        self._inbox.put(("stop", None))
        await asyncio.to_thread(self._thread.join)
        for handle in list(self._handles.values()):
            self._finish(handle, Delta("", (), "abort"))

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> RequestHandle:
        """Queue a request; `RequestRejected` when it can never be served."""
        if not self.healthy:
            raise EngineFailed(self.failure or "the engine is not running")
        self._engine.check(prompt, params)  # pure: safe beside the worker
        handle = RequestHandle(self, uuid.uuid4().hex, len(prompt))
        self._handles[handle.request_id] = handle
        self._inbox.put(("add", (handle.request_id, list(prompt), params)))
        return handle

    def stats(self) -> EngineStats:
        """The state after the last step."""
        return self._stats

    def _cancel(self, handle: RequestHandle) -> None:
        if self._handles.get(handle.request_id) is handle:
            self._inbox.put(("cancel", handle.request_id))
            self._finish(handle, Delta("", (), "abort"))

    def _finish(self, handle: RequestHandle, last: Delta | EngineFailed) -> None:
        self._handles.pop(handle.request_id, None)
        handle._put(last)

    # ---- worker thread ------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while self._obey():
                deltas = self._engine.step()
                self._stats = self._engine.stats()
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
            if verb == "stop":
                return False
            if verb == "add":
                self._engine.add(*argument)
            else:
                self._engine.cancel(argument)
            self._stats = self._engine.stats()

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

    def _fail(self) -> None:
        for handle in list(self._handles.values()):
            self._finish(handle, EngineFailed(self.failure))
