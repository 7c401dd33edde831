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

from kvq_cli.engine.params import RequestRejected, SamplingParams, TokenLogprobs
from kvq_cli.server.answers import (
    ChatLogprobs,
    PromptTokensDetails,
    Reason,
    TextLogprobs,
    Usage,
)
from kvq_cli.server.errors import ApiError, stopping
from kvq_cli.server.latency import Latency
from kvq_cli.server.places import Places
from kvq_cli.server.tokens import LogprobTeller, TokenTexts

if TYPE_CHECKING:
    from kvq_cli.engine.async_engine import AsyncEngine, RequestHandle

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Piece:
    """What came of one choice: text and logprobs, both may be empty, and at its end the reason."""

    index: int
    text: str
    reason: Reason | None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Service:
    """What generations of one server share.

    Attributes
    ----------
    timeout : most seconds from a request's submission to its last token; None = any
    """

    engine: AsyncEngine
    latency: Latency
    places: Places
    texts: TokenTexts
    timeout: float | None = None


class Generation:
    """The choices of every prompt; iterate for their pieces as they come.

    Whoever makes one must see that `cancel` is called in the end, whatever happens; it does no
    harm to choices that have finished.
    """

    def __init__(
        self,
        service: Service,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        choices: int,
        param: str,
    ) -> None:
        """`choices`: of each prompt; `param`: the HTTP parameter that the prompts came in;
        refusals name it.
        """
        self.id = uuid.uuid4().hex
        self.created = int(time.time())
        self.model = service.engine.model_name
        self.choices = choices
        self._service = service
        self._params = params
        self._param = param
        self._start = time.perf_counter()
        self._handles: list[RequestHandle] = []
        self._places = len(prompts) * choices
        service.places.take(self._places, "n" if choices > 1 else param)
        for prompt in prompts:
            try:
                self._handles += service.engine.submit_choices(prompt, params, choices)
            except RequestRejected as error:
                self.cancel()
                raise self._refused(error, len(prompt)) from error
            except Exception:
                self.cancel()
                raise
        self._tellers = [LogprobTeller(service.texts) for _ in self._handles]

    @property
    def usage(self) -> Usage:
        """Tokens so far; a prompt counts once, whatever the number of its choices."""
        first = self._handles[:: self.choices]
        prompt = sum(handle.prompt_tokens for handle in first)
        completion = sum(handle.completion_tokens for handle in self._handles)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=sum(handle.cached_tokens for handle in first)
            ),
        )

    def cancel(self) -> None:
        """Stop all choices, free their pages and their places."""
        for handle in self._handles:
            handle.cancel()
        self._service.places.give(self._places)
        self._places = 0

    def chat_logprobs(self, piece: Piece) -> ChatLogprobs | None:
        """What a piece says of its tokens, if that was asked."""
        if self._params.logprobs is None:
            return None
        return self._tellers[piece.index].chat(piece.logprobs)

    def text_logprobs(self, piece: Piece) -> TextLogprobs | None:
        """Likewise, for plain completions."""
        if self._params.logprobs is None:
            return None
        return self._tellers[piece.index].text(piece.logprobs)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """Pieces of all choices in the order they come; one choice's failure ends them all."""
        # one piece waits here; what comes meanwhile waits in the handles, joined
        arrived: asyncio.Queue[Piece | Exception] = asyncio.Queue(1)
        readers = [
            asyncio.create_task(self._read(index, handle, arrived))
            for index, handle in enumerate(self._handles)
        ]
        try:
            unfinished = len(readers)
            while unfinished:
                piece = await self._in_time(arrived.get())
                if isinstance(piece, Exception):
                    raise piece
                unfinished -= piece.reason is not None
                yield piece
        finally:
            for reader in readers:
                reader.cancel()
            for handle in self._handles:
                handle.cancel()

    async def _in_time(self, work: Coroutine[Any, Any, T]) -> T:
        limit = self._service.timeout
        left = None if limit is None else self._start + limit - time.perf_counter()
        try:
            async with asyncio.timeout(left):
                return await work
        except TimeoutError as error:
            raise ApiError(
                504,
                f"the answer took longer than the {limit:g} s that this server allows; ask for "
                "fewer tokens",
                code="timeout",
            ) from error

    async def _read(
        self, index: int, handle: RequestHandle, arrived: asyncio.Queue[Piece | Exception]
    ) -> None:
        latency, previous = self._service.latency, 0.0
        try:
            async for delta in handle:
                reason = delta.finish_reason
                if reason == "abort" or reason == "error":  # the latter never: its handle raises
                    raise stopping()
                seconds = time.perf_counter() - self._start
                fresh = len(delta.token_ids)
                if fresh and not previous:
                    latency.first_token.observe(seconds)
                    fresh, previous = fresh - 1, seconds
                for _ in range(fresh):  # those that came together share the time
                    latency.next_token.observe((seconds - previous) / fresh)
                previous = seconds if fresh else previous
                if reason is not None:
                    latency.whole.observe(seconds)
                await arrived.put(Piece(index, delta.text, reason, delta.logprobs))
        except RequestRejected as error:  # the cache became smaller after it was submitted
            await arrived.put(self._refused(error, handle.prompt_tokens))
        except Exception as error:  # for the one who iterates, not for this task
            await arrived.put(error)

    def _refused(self, error: RequestRejected, prompt_tokens: int) -> ApiError:
        if error.param is not None:
            return ApiError(400, str(error), param=error.param)
        room = self._service.engine.max_model_len - prompt_tokens
        code = "context_length_exceeded" if (self._params.max_tokens or 1) > room else None
        at_fault = "max_tokens" if code and room > 0 else self._param
        return ApiError(400, str(error), param=at_fault, code=code)

    async def collect(self) -> list[Piece]:
        """Every choice whole."""
        pieces: list[list[Piece]] = [[] for _ in self._handles]
        async for piece in self:
            pieces[piece.index].append(piece)
        return [
            Piece(
                index,
                "".join(piece.text for piece in found),
                found[-1].reason,
                tuple(each for piece in found for each in piece.logprobs),
            )
            for index, found in enumerate(pieces)
        ]


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
