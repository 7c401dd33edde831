"""The choices of one HTTP request: submitted, read and cancelled together."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from kvq_cli.engine.params import EngineFailed, RequestRejected, SamplingParams
from kvq_cli.server.errors import ApiError
from kvq_cli.server.latency import Latency
from kvq_cli.server.protocol import PromptTokensDetails, Reason, Usage

if TYPE_CHECKING:
    from kvq_cli.engine.async_engine import AsyncEngine, RequestHandle

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Piece:
    """What came of one choice: text that may be empty, and at its end the reason."""

    index: int
    text: str
    reason: Reason | None


class Generation:
    """One engine request for every prompt; iterate for their pieces as they come.

    Whoever makes one must see that `cancel` is called in the end, whatever happens; it does no
    harm to choices that have finished.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        latency: Latency,
        param: str,
    ) -> None:
        """`param`: the HTTP parameter that the prompts came in; refusals name it."""
        self.id = uuid.uuid4().hex
        self.created = int(time.time())
        self.model = engine.model_name
        self._engine = engine
        self._params = params
        self._param = param
        self._latency = latency
        self._start = time.perf_counter()
        self._handles: list[RequestHandle] = []
        for prompt in prompts:
            try:
                self._handles.append(engine.submit(prompt, params))
            except RequestRejected as error:
                self.cancel()
                raise self._refused(error, len(prompt)) from error
            except EngineFailed:
                self.cancel()
                raise

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        prompt = sum(handle.prompt_tokens for handle in self._handles)
        completion = sum(handle.completion_tokens for handle in self._handles)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=sum(handle.cached_tokens for handle in self._handles)
            ),
        )

    def cancel(self) -> None:
        """Stop all choices and free their pages."""
        for handle in self._handles:
            handle.cancel()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """Pieces of all choices in the order they come; one choice's failure ends them all."""
        arrived: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        readers = [
            asyncio.create_task(self._read(index, handle, arrived))
            for index, handle in enumerate(self._handles)
        ]
        try:
            unfinished = len(readers)
            while unfinished:
                piece = await arrived.get()
                if isinstance(piece, Exception):
                    raise piece
                unfinished -= piece.reason is not None
                yield piece
        finally:
            for reader in readers:
                reader.cancel()
            self.cancel()

    async def _read(
        self, index: int, handle: RequestHandle, arrived: asyncio.Queue[Piece | Exception]
    ) -> None:
        waiting = True
        try:
            async for delta in handle:
                if delta.finish_reason == "abort":
                    raise EngineFailed("it is stopping")
                assert delta.finish_reason != "error"  # its handle raises
                seconds = time.perf_counter() - self._start
                if waiting and delta.token_ids:
                    self._latency.first_token.observe(seconds)
                    waiting = False
                if delta.finish_reason is not None:
                    self._latency.whole.observe(seconds)
                arrived.put_nowait(Piece(index, delta.text, delta.finish_reason))
        except RequestRejected as error:  # the cache became smaller after it was submitted
            arrived.put_nowait(self._refused(error, handle.prompt_tokens))
        except Exception as error:  # for the one who iterates, not for this task
            arrived.put_nowait(error)

    def _refused(self, error: RequestRejected, prompt_tokens: int) -> ApiError:
        room = self._engine.max_model_len - prompt_tokens
        code = "context_length_exceeded" if (self._params.max_tokens or 1) > room else None
        at_fault = "max_tokens" if code and room > 0 else self._param
        return ApiError(400, str(error), param=at_fault, code=code)

    async def collect(self) -> list[tuple[str, Reason]]:
        """The whole text of every choice, and why it ended."""
        texts: list[list[str]] = [[] for _ in self._handles]
        reasons: dict[int, Reason] = {}
        async for piece in self:
            texts[piece.index].append(piece.text)
            if piece.reason is not None:
                reasons[piece.index] = piece.reason
        return [("".join(text), reasons[index]) for index, text in enumerate(texts)]


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves (`ClientDisconnect`).

    `receive`: of a request whose body has been read.
    """
    answer = asyncio.create_task(work)
    departure = asyncio.create_task(_departure(receive))
    try:
        await asyncio.wait({answer, departure}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        raise ClientDisconnect
    finally:
        answer.cancel()
        departure.cancel()
        await asyncio.gather(answer, departure, return_exceptions=True)


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
