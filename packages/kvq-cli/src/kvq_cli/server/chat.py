"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi import APIRouter, Request, Response

from kvq_cli.server import errors
from kvq_cli.server.answers import AssistantMessage, ChatChoice, ChatCompletion
from kvq_cli.server.generation import Generation, Service, while_connected
from kvq_cli.server.models import require_served
from kvq_cli.server.prompts import encode_chat
from kvq_cli.server.protocol import ChatRequest
from kvq_cli.server.streaming import Chunks, EventStream, Json


def routes(service: Service) -> APIRouter:
    """The route, for one engine."""
    engine = service.engine
    router = APIRouter(tags=["openai"])

    @router.post("/v1/chat/completions", response_model=ChatCompletion, responses=errors.ANSWERS)
    async def create_chat_completion(body: ChatRequest, request: Request) -> object:
        """The assistant's next message; with `stream`, as server-sent events."""
        require_served(engine, body.model)
        # before the work that reading a prompt is
        service.places.require(body.choices, "n")
        prompt = await encode_chat(engine.tokenizer, body.messages, room=engine.max_model_len)
        generation = Generation(
            service, [prompt], body.sampling(), choices=body.choices, param="messages"
        )
        id = f"chatcmpl-{generation.id}"
        if body.stream:
            return _stream(generation, id, include_usage=body.include_usage)
        try:
            answers = await while_connected(request.receive, generation.collect())
        finally:
            generation.cancel()
        return ChatCompletion(
            id=id,
            created=generation.created,
            model=generation.model,
            choices=[
                ChatChoice(
                    index=answer.index,
                    message=AssistantMessage(content=answer.text),
                    logprobs=generation.chat_logprobs(answer),
                    finish_reason=answer.reason or "stop",
                )
                for answer in answers
            ],
            usage=generation.usage,
        )

    return router


def _stream(generation: Generation, id: str, *, include_usage: bool) -> Response:
    chunks = Chunks(generation, id=id, kind="chat.completion.chunk", include_usage=include_usage)

    async def objects() -> AsyncIterator[Json]:
        for index in range(generation.choices):
            yield chunks.chunk(index, delta={"role": "assistant", "content": ""})
        async for piece in generation:
            if piece.text or piece.logprobs:
                told = generation.chat_logprobs(piece)
                yield chunks.chunk(piece.index, logprobs=told, delta={"content": piece.text})
            if piece.reason is not None:
                yield chunks.chunk(piece.index, piece.reason, delta={})
        for chunk in chunks.last():
            yield chunk

    return EventStream(generation, objects())
