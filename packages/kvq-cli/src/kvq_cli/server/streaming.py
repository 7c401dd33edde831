"""Server-sent events: one JSON object an event, `[DONE]` at the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from typing import Any

from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from kvq_cli.server.errors import as_api_error
from kvq_cli.server.generation import Generation, while_connected

logger = logging.getLogger(__name__)

Json = Mapping[str, Any]

# What a client does not read is kept for it, and so is its place, but not for ever.
STALLED_SECONDS = 60.0


class EventStream(StreamingResponse):
    """Sends events; however it ends (the client may leave at any time), its choices end too."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, objects: AsyncIterable[Json]) -> None:
        # proxies must neither keep nor collect what is sent
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_events(objects), headers=headers)
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Starlette's own way notices a client that left only when it writes, or not at all: that
        # depends on the versions of the server and of its protocol
        try:
            with contextlib.suppress(ClientDisconnect, OSError):
                await while_connected(receive, self.stream_response(_impatient(send)))
        finally:
            self._generation.cancel()


def _impatient(send: Send) -> Send:
    """`send`, for which a client that reads nothing for long has left."""

    async def sent(message: Message) -> None:
        try:
            async with asyncio.timeout(STALLED_SECONDS):
                await send(message)
        except TimeoutError:
            logger.warning("a client read nothing for %g s; its request ends", STALLED_SECONDS)
            raise ClientDisconnect from None

    return sent


async def _events(objects: AsyncIterable[Json]) -> AsyncIterator[str]:
    try:
        async for item in objects:
            yield _event(item)
    except Exception as error:  # the status is sent already: the error becomes the last event
        yield _event(as_api_error(error).body)
    else:
        yield "data: [DONE]\n\n"


def _event(item: Json) -> str:
    return f"data: {json.dumps(item, ensure_ascii=False, separators=(',', ':'))}\n\n"


class Chunks:
    """Makes the objects of one stream: they share everything but their choices."""

    def __init__(self, generation: Generation, *, id: str, kind: str, include_usage: bool) -> None:
        self._generation = generation
        self._common: dict[str, Any] = {
            "id": id,
            "object": kind,
            "created": generation.created,
            "model": generation.model,
        }
        self._include_usage = include_usage

    def chunk(
        self,
        index: int,
        reason: str | None = None,
        logprobs: BaseModel | None = None,
        **content: Any,
    ) -> Json:
        """A piece of one choice."""
        told = logprobs and logprobs.model_dump()
        choice = {"index": index, **content, "logprobs": told, "finish_reason": reason}
        usage = {"usage": None} if self._include_usage else {}
        return {**self._common, "choices": [choice], **usage}

    def last(self) -> list[Json]:
        """What comes after all choices: the usage, if it was asked for."""
        if not self._include_usage:
            return []
        return [{**self._common, "choices": [], "usage": self._generation.usage.model_dump()}]
