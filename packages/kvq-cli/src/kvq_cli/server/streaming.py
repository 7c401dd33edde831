"""Server-sent events: one JSON object an event, `[DONE]` at the end."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvq_cli.server.errors import as_api_error
from kvq_cli.server.generation import Generation, while_connected

Json = Mapping[str, Any]


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
                await while_connected(receive, self.stream_response(send))
        finally:
            self._generation.cancel()


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

    def chunk(self, index: int, reason: str | None = None, **content: Any) -> Json:
        """A piece of one choice."""
        choice = {"index": index, **content, "logprobs": None, "finish_reason": reason}
        usage = {"usage": None} if self._include_usage else {}
        return {**self._common, "choices": [choice], **usage}

    def last(self) -> list[Json]:
        """What comes after all choices: the usage, if it was asked for."""
        if not self._include_usage:
            return []
        return [{**self._common, "choices": [], "usage": self._generation.usage.model_dump()}]
