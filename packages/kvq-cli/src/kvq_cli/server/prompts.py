"""What a client sends to what the engine reads: token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvq_cli.server.errors import ApiError
from kvq_cli.server.protocol import Message

# Shorter text is tokenized in well under the time of a step; longer text goes to a thread, so
# that other requests' tokens keep flowing.
THREAD_CHARACTERS = 16_384
# Text of more characters for each token that there is room for hardly fits: it is counted piece by
# piece first, because tokens take a hundred times the memory of their text.
LIKELY_CHARACTERS = 4
CUT_TOKENS = 64  # more than a cut within a token can add to a piece

T = TypeVar("T")


async def encode(
    tokenizer: Any, text: str, *, add_special_tokens: bool, room: int, param: str
) -> list[int]:
    """Token ids of a text.

    Raises `ApiError`, naming `param`, for a text of far more than `room` tokens, having computed
    not many more than those.
    """

    def work() -> list[int]:
        if len(text) > max(THREAD_CHARACTERS, LIKELY_CHARACTERS * room):
            _require_room(tokenizer, text, room, param)
        # not verbose: the engine's own limit is what counts, not the one the tokenizer warns of
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False))

    return await _aside(work, len(text))


async def _aside(work: Callable[[], T], characters: int) -> T:
    """In a thread, if it is much."""
    return await asyncio.to_thread(work) if characters > THREAD_CHARACTERS else work()


def _require_room(tokenizer: Any, text: str, room: int, param: str) -> None:
    least = 0
    for start in range(0, len(text), THREAD_CHARACTERS):
        piece = text[start : start + THREAD_CHARACTERS]
        tokens = tokenizer.encode(piece, add_special_tokens=False, verbose=False)
        least += max(0, len(tokens) - CUT_TOKENS)
        if least > room:
            raise ApiError(
                400,
                f"the prompt of {len(text):,} characters has more than {least} tokens; at most "
                f"{room} fit, prompt and generated together; shorten the prompt",
                param=param,
                code="context_length_exceeded",
            )


async def encode_prompts(
    tokenizer: Any, prompts: Sequence[str] | Sequence[list[int]], *, room: int
) -> list[list[int]]:
    """Token ids of every prompt; those given as ids pass through."""
    found = []
    for prompt in prompts:
        if not isinstance(prompt, str):
            found.append(prompt)
            continue
        found.append(
            await encode(tokenizer, prompt, add_special_tokens=True, room=room, param="prompt")
        )
        await asyncio.sleep(0)  # many short prompts are a long one: let others have a turn
    return found


async def encode_chat(tokenizer: Any, messages: Sequence[Message], *, room: int) -> list[int]:
    """Token ids of a conversation, up to where the assistant speaks next."""
    if tokenizer.chat_template is None:
        raise ApiError(
            400,
            "this model has no chat template: it continues text; use /v1/completions",
            param="messages",
        )
    conversation = [message.for_template() for message in messages]

    def render() -> str:
        text: str = tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True
        )
        return text

    try:
        text = await _aside(render, sum(64 + len(each["content"]) for each in conversation))
    # a template is a program that comes with the model: it may raise anything at these messages
    except Exception as error:
        raise ApiError(
            400, f"the model's chat template refuses these messages: {error}", param="messages"
        ) from error
    # the template writes the special tokens itself
    return await encode(tokenizer, text, add_special_tokens=False, room=room, param="messages")
