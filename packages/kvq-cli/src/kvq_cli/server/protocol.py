"""OpenAI's request and response objects, as far as this server speaks them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from kvq_cli.engine.params import SamplingParams
from kvq_cli.server.fields import Body, Expected, Ignored, Only, Text

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
StopText = Annotated[Text, Field(min_length=1)]
Stop = Annotated[
    StopText | Annotated[list[StopText], Field(max_length=4)] | None,
    Expected("a string or a list of at most 4 strings, none of them empty"),
]


class StreamOptions(Body):
    """What a stream says beside its text."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, Only(False)] = None


class GenerationRequest(Body):
    """What chat and plain completions share."""

    model: Text
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, description="0 or -1: all tokens")] | None = None
    min_p: Share | None = None
    seed: Seed | None = None
    stop: Stop = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    n: Annotated[Any, Only(1)] = None
    frequency_penalty: Annotated[Any, Only(0)] = None
    presence_penalty: Annotated[Any, Only(0)] = None
    repetition_penalty: Annotated[Any, Only(1)] = None
    logit_bias: Annotated[Any, Only({})] = None
    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "invalid_parameter",
                "is only allowed when stream is true",
                {"param": "stream_options"},
            )
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that counts tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def _sampling(self, max_tokens: int | None) -> SamplingParams:
        given: dict[str, Any] = {
            name: value
            for name in ("temperature", "top_p", "min_p", "seed", "ignore_eos")
            if (value := getattr(self, name)) is not None
        }
        if self.top_k is not None:
            given["top_k"] = max(0, self.top_k)
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(max_tokens=max_tokens, stop=stop, **given)


class TextPart(Body):
    """A piece of a message."""

    type: Annotated[Literal["text"], Expected("'text': this server reads text only")]
    text: Text


def _parts(content: Any) -> Any:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if isinstance(content, list) and content:
        return content
    raise PydanticCustomError("shape", "must be a string or a list of text parts, not empty")


class Message(Body):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        list[TextPart],
        BeforeValidator(_parts, json_schema_input_type=str | list[TextPart]),
    ]
    name: Text | None = None

    # an assistant's message as clients send it back
    refusal: Annotated[Any, Only()] = None
    annotations: Annotated[Any, Only([])] = None
    audio: Annotated[Any, Only()] = None
    function_call: Annotated[Any, Only()] = None
    tool_calls: Annotated[Any, Only([])] = None

    def for_template(self) -> dict[str, str]:
        """The message in the words that chat templates know."""
        # `developer` is OpenAI's newer word for `system`
        message = {
            "role": "system" if self.role == "developer" else self.role,
            "content": "\n".join(part.text for part in self.content),
        }
        return message if self.name is None else {**message, "name": self.name}


class ChatRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None

    logprobs: Annotated[Any, Only(False)] = None
    top_logprobs: Annotated[Any, Only(0)] = None
    response_format: Annotated[Any, Only({"type": "text"})] = None
    tools: Annotated[Any, Only([])] = None
    tool_choice: Annotated[Any, Only("none", "auto")] = None
    parallel_tool_calls: Annotated[Any, Only(True, False)] = None
    functions: Annotated[Any, Only([])] = None
    function_call: Annotated[Any, Only("none", "auto")] = None
    modalities: Annotated[Any, Only(["text"])] = None
    audio: Annotated[Any, Only()] = None
    prediction: Annotated[Any, Only()] = None
    reasoning_effort: Annotated[Any, Only("none")] = None
    verbosity: Annotated[Any, Only("medium")] = None
    web_search_options: Annotated[Any, Only()] = None

    @model_validator(mode="after")
    def _one_limit(self) -> ChatRequest:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise PydanticCustomError(
                "invalid_parameter",
                "and max_tokens are two names of one limit; give one",
                {"param": "max_completion_tokens"},
            )
        return self

    def sampling(self) -> SamplingParams:
        """The engine's words for it; without a limit, as much as the context allows."""
        return self._sampling(self.max_completion_tokens or self.max_tokens)


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Annotated[
        Text
        | Annotated[list[Text], Field(min_length=1)]
        | Annotated[list[int], Field(min_length=1)]
        | Annotated[list[list[int]], Field(min_length=1)],
        Expected("a string, a list of strings, a list of token ids or a list of such lists"),
    ]

    best_of: Annotated[Any, Only(1)] = None
    echo: Annotated[Any, Only(False)] = None
    logprobs: Annotated[Any, Only()] = None
    suffix: Annotated[Any, Only("")] = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Every prompt: text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    def sampling(self) -> SamplingParams:
        """The engine's words for it."""
        return self._sampling(self.max_tokens or COMPLETION_MAX_TOKENS)


# ---- answers ------------------------------------------------------------------------------------

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


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: None = None
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
    logprobs: None = None
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
