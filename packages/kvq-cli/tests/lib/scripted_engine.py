"""An engine with the real one's interface whose answers are known: it counts.

It answers a prompt of n tokens with the words `n:0 n:1 n:2 …`, one token each, and ends by itself
after `words` of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import pairwise

from kvq_cli.engine.params import (
    AttentionCheck,
    CacheSize,
    Delta,
    EngineFailed,
    EngineStats,
    EngineSummary,
    RebuildBusy,
    RebuildReport,
    RequestFailed,
    RequestRejected,
    SamplingParams,
    Stored,
    TierStats,
    TokenLogprobs,
)
from kvq_pools import PrefixStats

VOCABULARY = 0x110000  # a token is a character
BOS = 1
FAILS = 2  # a prompt with this token makes its request raise EngineFailed after one word
BREAKS = 3  # … and this one something that nobody foresaw
GOES_WRONG = 4  # … and this one RequestFailed
PAGE_TOKENS = 16
TOTAL_PAGES = 100
MODEL = "scripted/model-1"
ATTENTION = {"store": "fast", "decode": "fast", "extend": "slow"}


class CharacterTokenizer:
    """One token a character; its chat template wants turns to alternate, as many real ones do."""

    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template

    def encode(self, text: str, *, add_special_tokens: bool, verbose: bool) -> list[int]:
        text.encode()  # a real tokenizer cannot take lone surrogates either
        return [BOS] * add_special_tokens + [ord(c) for c in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize and add_generation_prompt
        roles = [m["role"] for m in messages if m["role"] != "system"]
        if any(a == b for a, b in pairwise(roles)):
            raise RuntimeError("Conversation roles must alternate")
        return "".join(f"{m['role']}>{m['content']}\n" for m in messages) + "assistant>"


class ScriptedHandle:
    def __init__(self, engine: ScriptedEngine, prompt: list[int], params: SamplingParams) -> None:
        self.request_id = f"r{len(engine.submitted)}"
        self.prompt, self.params = prompt, params
        self.prompt_tokens = len(prompt)
        self.completion_tokens = 0
        self.cached_tokens = self.prompt_tokens // 2
        self.cancelled = False
        self._engine = engine
        self._deltas: asyncio.Queue[Delta | Exception] = asyncio.Queue()
        self._producer = asyncio.create_task(self._produce())

    async def _produce(self) -> None:
        engine = self._engine
        limit = self.params.max_tokens or engine.max_model_len - self.prompt_tokens
        for n in range(min(limit, engine.words)):
            await asyncio.sleep(engine.pause)
            if n == 1 and FAILS in self.prompt:
                return self.finish(EngineFailed("scripted failure"))
            if n == 1 and GOES_WRONG in self.prompt:
                return self.finish(RequestFailed("RuntimeError: scripted mishap"))
            if n == 1 and BREAKS in self.prompt:
                return self.finish(ZeroDivisionError("scripted defect"))
            self.completion_tokens += 1
            last = n + 1 == min(limit, engine.words)
            reason = ("stop" if limit >= engine.words else "length") if last else None
            told = self._logprobs(n)
            delta = Delta(f"{self.prompt_tokens}:{n} ", (n,), reason, 0, told)
            if last:
                return self.finish(delta)
            self._deltas.put_nowait(delta)

    def _logprobs(self, n: int) -> tuple[TokenLogprobs, ...]:
        """The nth token is the character n; those after it are ever less likely."""
        if self.params.logprobs is None:
            return ()
        top = tuple((n + i, -0.5 * (i + 1)) for i in range(self.params.logprobs))
        return (TokenLogprobs(n, -0.5, top),)

    def finish(self, last: Delta | Exception) -> None:
        if self in self._engine.live:
            self._engine.live.remove(self)
            self._engine.finished[getattr(last, "finish_reason", "abort")] += 1
            self._deltas.put_nowait(last)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while True:
            delta = await self._deltas.get()
            if isinstance(delta, Exception):
                raise delta
            yield delta
            if delta.finish_reason is not None:
                return

    def cancel(self) -> None:
        if self in self._engine.live:
            self.cancelled = True
            self._producer.cancel()
            self.finish(Delta("", (), "abort"))


class ScriptedEngine:
    def __init__(
        self,
        *,
        words: int = 5,
        pause: float = 0.0,
        max_model_len: int = 1000,
        chat_template: str | None = "{{ messages }}",
        model_name: str = MODEL,
    ) -> None:
        self.words, self.pause = words, pause
        self.model_name, self.max_model_len = model_name, max_model_len
        self.max_running_requests = 16
        self.tokenizer = CharacterTokenizer(chat_template)
        self.summary = EngineSummary(
            model_name=model_name,
            cache_dtype="k=q8_0,v=q4_0",
            bytes_per_token=9360.0,
            bf16_bytes_per_token=23040.0,
            page_tokens=PAGE_TOKENS,
            num_tokens=TOTAL_PAGES * PAGE_TOKENS,
            bf16_num_tokens=650,
            max_model_len=max_model_len,
            cache_bytes=9360 * PAGE_TOKENS * TOTAL_PAGES,
            attention=dict(ATTENTION),
            weights="scripted on paper",
            prefix_cache=True,
            attention_check=AttentionCheck(7, 0.25, ("extend is computed by slow instead",)),
            notes=("a note for the [user]",),
        )
        self.last_rebuild: RebuildReport | None = None
        self.rebuilds: list[tuple[int | None, str | None]] = []
        self.rebuild_ends = asyncio.Event()
        self.rebuild_ends.set()
        self.rebuild_error: Exception | None = None
        self.state = "ready"
        self.failure: str | None = None
        self.running = False
        self.submitted: list[ScriptedHandle] = []
        self.live: list[ScriptedHandle] = []
        self.finished: Counter[str] = Counter()

    @property
    def healthy(self) -> bool:
        return self.running and self.failure is None

    def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.running = True

    async def stop(self, patience: float | None = None) -> None:
        self.running = False
        for handle in list(self.live):
            handle.cancel()

    def submit_choices(
        self, prompt: Sequence[int], params: SamplingParams, count: int
    ) -> list[ScriptedHandle]:
        assert asyncio.get_running_loop() is self.loop
        if not self.healthy:
            raise EngineFailed(self.failure or "not running")
        if not prompt:
            raise RequestRejected("the prompt is empty; give at least one token")
        if bad := [t for t in prompt if not 0 <= t < VOCABULARY]:
            raise RequestRejected(f"token id {bad[0]} is outside the vocabulary of {VOCABULARY}")
        if len(prompt) + (params.max_tokens or 1) > self.max_model_len:
            raise RequestRejected(
                f"{len(prompt)} prompt tokens and {params.max_tokens} to generate exceed the "
                f"context of {self.max_model_len} tokens"
            )
        handles = [ScriptedHandle(self, list(prompt), params) for _ in range(count)]
        self.submitted += handles
        self.live += handles
        return handles

    @property
    def snapshot(self) -> tuple[EngineSummary, EngineStats]:
        return self.summary, self.stats()

    async def rebuild(self, num_tokens: int | None, cache_dtype: str | None) -> RebuildReport:
        assert asyncio.get_running_loop() is self.loop
        if self.state == "rebuilding":
            raise RebuildBusy("another rebuild runs")
        self.state = "rebuilding"
        self.rebuilds.append((num_tokens, cache_dtype))
        await self.rebuild_ends.wait()
        self.state = "ready"
        if self.rebuild_error is not None:
            raise self.rebuild_error
        before, now = self.size(), self.summary
        self.summary = replace(
            now,
            cache_dtype=cache_dtype or now.cache_dtype,
            num_tokens=num_tokens or now.num_tokens,
            max_model_len=min(self.max_model_len, num_tokens or now.num_tokens),
        )
        self.max_model_len = self.summary.max_model_len
        self.last_rebuild = RebuildReport(
            before=before,
            after=self.size(),
            finished_at=1.7e9,
            seconds=0.25,
            requests_kept=2,
            requests_requeued=1,
            cached_kept={"full": 5, "window": 0},
            cached_dropped={"full": 3, "window": 2},
        )
        return self.last_rebuild

    def size(self) -> CacheSize:
        now = self.summary
        return CacheSize(
            now.cache_dtype,
            now.num_tokens,
            now.cache_bytes,
            now.bytes_per_token,
            now.max_model_len,
            now.attention,
        )

    def fail(self, message: str) -> None:
        """The worker dies; may be called from any thread."""

        def die() -> None:
            self.failure = message
            self.state = "failed"
            for handle in list(self.live):
                handle._producer.cancel()
                handle.finish(EngineFailed(message))

        # a loop that is gone has nobody left to tell
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(die)

    def stats(self) -> EngineStats:
        used = sum(-(-(h.prompt_tokens + h.completion_tokens) // PAGE_TOKENS) for h in self.live)
        return EngineStats(
            running=len(self.live),
            waiting=0,
            tiers=(
                TierStats(
                    "full",
                    None,
                    99840,
                    10083840,
                    TOTAL_PAGES,
                    TOTAL_PAGES - used - 4,
                    4,
                    (
                        Stored("k", "q8_0", (0, 2, 3, 4), 6 << 20),
                        Stored("v", "q4_0", (0, 2, 3, 4), 3 << 20),
                    ),
                ),
                TierStats(
                    "window", 32, 49920, 399360, 7, 7, 0, (Stored("k", "q8_0", (1,), 1 << 19),)
                ),
            ),
            prefix=PrefixStats(3, 30, 12, 6),
            prompt_tokens_total=sum(h.prompt_tokens for h in self.submitted),
            generation_tokens_total=sum(h.completion_tokens for h in self.submitted),
            requests_finished_total=dict(self.finished),
            steps_total=3,
            extend_routes={"triton: dense (cudnn)": 2048, "triton: loop": 3},
            last_rebuild=self.last_rebuild,
        )
