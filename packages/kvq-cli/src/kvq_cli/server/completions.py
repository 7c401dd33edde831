"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from kvq_cli.server import errors
from kvq_cli.server.generation import Generation, while_connected
from kvq_cli.server.latency import Latency
from kvq_cli.server.models import require_served
from kvq_cli.server.prompts import encode_prompts
from kvq_cli.server.protocol import Completion, CompletionRequest, TextChoice
from kvq_cli.server.streaming import Chunks, EventStream, Json

if TYPE_CHECKING:
    from kvq_cli.engine.async_engine import AsyncEngine


def routes(engine: AsyncEngine, latency: Latency) -> APIRouter:
    """The route, for one engine."""
    router = APIRouter(tags=["openai"])

    @router.post("/v1/completions", response_model=Completion, responses=errors.ANSWERS)
    async def create_completion(body: CompletionRequest, request: Request) -> object:
        """One continuation of every prompt; with `stream`, as server-sent events."""
        require_served(engine, body.model)
        prompts = await encode_prompts(engine.tokenizer, body.prompts)
        generation = Generation(engine, prompts, body.sampling(), latency=latency, param="prompt")
        id = f"cmpl-{generation.id}"
        if body.stream:
            return _stream(generation, id, include_usage=body.include_usage)
        texts = await while_connected(request.receive, generation.collect())
        return Completion(
            id=id,
            created=generation.created,
            model=generation.model,
            choices=[
                TextChoice(index=index, text=text, finish_reason=reason)
                for index, (text, reason) in enumerate(texts)
            ],
            usage=generation.usage,
        )

    return router


def _stream(generation: Generation, id: str, *, include_usage: bool) -> Response:
    chunks = Chunks(generation, id=id, kind="text_completion", include_usage=include_usage)

    async def objects() -> AsyncIterator[Json]:
        async for piece in generation:
            if piece.text or piece.reason is not None:
                yield chunks.chunk(piece.index, piece.reason, text=piece.text)
        for chunk in chunks.last():
            yield chunk

    return EventStream(generation, objects())
