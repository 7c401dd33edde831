"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi import APIRouter, Request, Response

from kvq_cli.server import errors
from kvq_cli.server.answers import Completion, TextChoice
from kvq_cli.server.generation import Generation, Service, while_connected
from kvq_cli.server.models import require_served
from kvq_cli.server.prompts import encode_prompts
from kvq_cli.server.protocol import CompletionRequest
from kvq_cli.server.streaming import Chunks, EventStream, Json


def routes(service: Service) -> APIRouter:
    """The route, for one engine."""
    engine = service.engine
    router = APIRouter(tags=["openai"])

    @router.post("/v1/completions", response_model=Completion, responses=errors.ANSWERS)
    async def create_completion(body: CompletionRequest, request: Request) -> object:
        """Continuations of every prompt; with `stream`, as server-sent events."""
        require_served(engine, body.model)
        # before the work that reading prompts is
        service.places.require(len(body.prompts) * body.choices, body.many)
        prompts = await encode_prompts(engine.tokenizer, body.prompts, room=engine.max_model_len)
        generation = Generation(
            service, prompts, body.sampling(), choices=body.choices, param="prompt"
        )
        id = f"cmpl-{generation.id}"
        if body.stream:
            return _stream(generation, id, include_usage=body.include_usage)
        try:
            answers = await while_connected(request.receive, generation.collect())
        finally:
            generation.cancel()
        return Completion(
            id=id,
            created=generation.created,
            model=generation.model,
            choices=[
                TextChoice(
                    index=answer.index,
                    text=answer.text,
                    logprobs=generation.text_logprobs(answer),
                    finish_reason=answer.reason,
                )
                for answer in answers
            ],
            usage=generation.usage,
        )

    return router


def _stream(generation: Generation, id: str, *, include_usage: bool) -> Response:
    chunks = Chunks(generation, id=id, kind="text_completion", include_usage=include_usage)

    async def objects() -> AsyncIterator[Json]:
        async for piece in generation:
            if piece.text or piece.logprobs or piece.reason is not None:
                told = generation.text_logprobs(piece)
                yield chunks.chunk(piece.index, piece.reason, logprobs=told, text=piece.text)
        for chunk in chunks.last():
            yield chunk

    return EventStream(generation, objects())
