"""OpenAI's answer objects, as far as this server speaks them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

Reason = Literal["stop", "length"]


class PromptTokensDetails(BaseModel):
    """What of the prompt was not computed."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of one HTTP request, all its choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class AssistantMessage(BaseModel):
    """What the model says."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class TopLogprob(BaseModel):
    """A token and the natural logarithm of its probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of an answer, and those that were the most likely in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """What the model held of the tokens of a chat's answer."""

    content: list[TokenLogprob]
    refusal: None = None


class TextLogprobs(BaseModel):
    """What the model held of the tokens of a continuation, one line each."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Reason


class ChatCompletion(BaseModel):
    """Answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class TextChoice(BaseModel):
    """One continuation of one prompt, or in a stream a piece of it."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: Reason | None


class Completion(BaseModel):
    """Answer of POST /v1/completions."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class Model(BaseModel):
    """A model that requests may name."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "kvq"
    max_model_len: int


class ModelList(BaseModel):
    """Answer of GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[Model]


class ErrorDetail(BaseModel):
    """What went wrong and where."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every answer that is not a success."""

    error: ErrorDetail
