"""OpenAI's request objects, as far as this server speaks them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from kvq_cli.engine.params import MOST_LOGPROBS, SamplingParams
from kvq_cli.server.fields import Body, Expected, Ignored, List, Only, Text

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TopCount = Annotated[int, Field(ge=0, le=MOST_LOGPROBS)]
TokenId = Annotated[str, Field(pattern=r"^(0|[1-9]\d{0,8})$")]
Bias = Annotated[
    dict[TokenId, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=1024),
    Expected("an object of at most 1,024 token ids, each with a number from -100 to 100"),
]
MOST_CHOICES = 128  # of one prompt
MOST_ITEMS = 16_384  # messages of a conversation, parts of a message, prompts of a request
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
StopText = Annotated[Text, Field(min_length=1)]
Stop = Annotated[
    StopText | Annotated[List[StopText], Field(max_length=4)] | None,
    Expected("a string or a list of at most 4 strings, none of them empty"),
]


class StreamOptions(Body):
    """What a stream says beside its text."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, Only(False)] = None


# Parameters that the engine knows by the same name.
SAMPLING = (
    "temperature",
    "top_p",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "ignore_eos",
)


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

    n: Annotated[int, Field(ge=1, le=MOST_CHOICES, description="answers to each prompt")] | None = (
        None
    )
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: Bias | None = None

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

    @property
    def choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    def _sampling(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        given: dict[str, Any] = {
            name: value for name in SAMPLING if (value := getattr(self, name)) is not None
        }
        if self.top_k is not None:
            given["top_k"] = max(0, self.top_k)
        if self.logit_bias:
            given["logit_bias"] = tuple((int(t), value) for t, value in self.logit_bias.items())
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(max_tokens=max_tokens, stop=stop, logprobs=logprobs, **given)


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
        List[TextPart],
        Field(max_length=MOST_ITEMS),
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

    messages: Annotated[List[Message], Field(min_length=1, max_length=MOST_ITEMS)]
    max_completion_tokens: Count | None = None

    logprobs: bool | None = None
    top_logprobs: TopCount | None = None

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

    @model_validator(mode="after")
    def _alternatives_need_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError(
                "invalid_parameter",
                "is only allowed when logprobs is true",
                {"param": "top_logprobs"},
            )
        return self

    def sampling(self) -> SamplingParams:
        """The engine's words for it; without a limit, as much as the context allows."""
        top = (self.top_logprobs or 0) if self.logprobs else None
        return self._sampling(self.max_completion_tokens or self.max_tokens, top)


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Annotated[
        Text
        | Annotated[List[Text], Field(min_length=1, max_length=MOST_ITEMS)]
        | Annotated[List[int], Field(min_length=1)]
        | Annotated[List[List[int]], Field(min_length=1, max_length=MOST_ITEMS)],
        Expected(
            "a string, a list of strings, a list of token ids or a list of such lists; lists of "
            f"at most {MOST_ITEMS:,} prompts"
        ),
    ]

    logprobs: TopCount | None = None

    best_of: Annotated[Any, Only(1)] = None
    echo: Annotated[Any, Only(False)] = None
    suffix: Annotated[Any, Only("")] = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Every prompt: text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    @property
    def many(self) -> str:
        """The parameter that asks for the number of answers."""
        return "n" if self.choices > 1 else "prompt"

    def sampling(self) -> SamplingParams:
        """The engine's words for it."""
        return self._sampling(self.max_tokens or COMPLETION_MAX_TOKENS, self.logprobs)
