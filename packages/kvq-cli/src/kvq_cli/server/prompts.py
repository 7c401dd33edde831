"""What a client sends to what the engine reads: token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from kvq_cli.server.errors import ApiError
from kvq_cli.server.protocol import Message

# Shorter text is tokenized in well under the time of a step; longer text goes to a thread, so
# that other requests' tokens keep flowing.
THREAD_CHARACTERS = 16_384


async def encode(tokenizer: Any, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text."""

    def work() -> list[int]:
        # not verbose: the engine's own limit is what counts, not the one the tokenizer warns of
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False))

    return await asyncio.to_thread(work) if len(text) > THREAD_CHARACTERS else work()


async def encode_prompts(
    tokenizer: Any, prompts: Sequence[str] | Sequence[list[int]]
) -> list[list[int]]:
    """Token ids of every prompt; those given as ids pass through."""
    found = []
    for prompt in prompts:
        if not isinstance(prompt, str):
            found.append(prompt)
            continue
        found.append(await encode(tokenizer, prompt, add_special_tokens=True))
        await asyncio.sleep(0)  # many short prompts are a long one: let others have a turn
    return found


async def encode_chat(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation, up to where the assistant speaks next."""
    if tokenizer.chat_template is None:
        raise ApiError(
            400,
            "this model has no chat template: it continues text; use /v1/completions",
            param="messages",
        )
    try:
        text = tokenizer.apply_chat_template(
            [message.for_template() for message in messages],
            tokenize=False,
            add_generation_prompt=True,
        )
    # a template is a program that comes with the model: it may raise anything at these messages
    except Exception as error:
        raise ApiError(
            400, f"the model's chat template refuses these messages: {error}", param="messages"
        ) from error
    # the template writes the special tokens itself
    return await encode(tokenizer, text, add_special_tokens=False)
