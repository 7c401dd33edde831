"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from kvq_cli.server import errors
from kvq_cli.server.generation import Generation, while_connected
from kvq_cli.server.latency import Latency
from kvq_cli.server.models import require_served
from kvq_cli.server.prompts import encode_chat
from kvq_cli.server.protocol import AssistantMessage, ChatChoice, ChatCompletion, ChatRequest
from kvq_cli.server.streaming import Chunks, EventStream, Json

if TYPE_CHECKING:
    from kvq_cli.engine.async_engine import AsyncEngine


def routes(engine: AsyncEngine, latency: Latency) -> APIRouter:
    """The route, for one engine."""
    router = APIRouter(tags=["openai"])

    @router.post("/v1/chat/completions", response_model=ChatCompletion, responses=errors.ANSWERS)
    async def create_chat_completion(body: ChatRequest, request: Request) -> object:
        """The assistant's next message; with `stream`, as server-sent events."""
        require_served(engine, body.model)
        prompt = await encode_chat(engine.tokenizer, body.messages)
        generation = Generation(
            engine, [prompt], body.sampling(), latency=latency, param="messages"
        )
        id = f"chatcmpl-{generation.id}"
        if body.stream:
            return _stream(generation, id, include_usage=body.include_usage)
        [(text, reason)] = await while_connected(request.receive, generation.collect())
        return ChatCompletion(
            id=id,
            created=generation.created,
            model=generation.model,
            choices=[
                ChatChoice(index=0, message=AssistantMessage(content=text), finish_reason=reason)
            ],
            usage=generation.usage,
        )

    return router


def _stream(generation: Generation, id: str, *, include_usage: bool) -> Response:
    chunks = Chunks(generation, id=id, kind="chat.completion.chunk", include_usage=include_usage)

    async def objects() -> AsyncIterator[Json]:
        yield chunks.chunk(0, delta={"role": "assistant", "content": ""})
        async for piece in generation:
            if piece.text:
                yield chunks.chunk(0, delta={"content": piece.text})
            if piece.reason is not None:
                yield chunks.chunk(0, piece.reason, delta={})
        for chunk in chunks.last():
            yield chunk

    return EventStream(generation, objects())
