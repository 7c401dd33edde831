"""A random-weight model of a few thousand parameters, and an engine over it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from kvq_attention.support import Choice
from kvq_cli.compose import ServeOptions, assemble, choose_cache
from kvq_cli.config import geometry
from kvq_cli.engine.async_engine import AsyncEngine
from kvq_cli.engine.engine import Engine
from kvq_cli.engine.params import Delta, EngineSummary, SamplingParams
from kvq_cli.models import attention

VOCABULARY = 96
WINDOW = 24
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,  # tied random weights repeat the last token whatever they see
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
LAYERS_4_2: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class Letters:
    """A tokenizer whose tokens are single characters."""

    chat_template = None

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(c) - 32 for c in text]

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return "".join(chr(32 + t) for t in tokens)


def llama(seed: int = 0, head_dim: int = 32) -> LlamaForCausalLM:
    """Two full-attention layers, 4/2 heads."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SMALL, **LAYERS_4_2, head_dim=head_dim)).eval()


def mistral(seed: int = 0, head_dim: int = 32) -> MistralForCausalLM:
    """Two layers, both of which slide a window of 24, 4/2 heads."""
    torch.manual_seed(seed)
    config = MistralConfig(**SMALL, **LAYERS_4_2, head_dim=head_dim, sliding_window=WINDOW)
    return MistralForCausalLM(config).eval()


def gemma(seed: int = 0, head_dim: int = 32) -> Gemma3ForCausalLM:
    """Four layers, two of which slide a window of 24, 2/1 heads."""
    torch.manual_seed(seed)
    config = Gemma3TextConfig(
        **SMALL,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=head_dim,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=head_dim,
    )
    return Gemma3ForCausalLM(config).eval()


def make_engine(
    model: Any,
    *,
    cache: str = "fp32",
    num_pages: int = 64,
    page_tokens: int = 4,
    max_model_len: int | None = None,
    max_running_requests: int = 8,
    max_prefill_tokens: int = 16,
    tokenizer: Any = None,
    cache_type: str = "prefix",
    state_snapshots: int | None = None,
    attention_backend: str = "auto",
    prefill_reads: str = "own",
    prefill_scratch_mb: int = 128,
    cuda_graph_max_bs: int = 0,
    cuda_graph_max_prefill_tokens: int = 0,
    backends: Choice | None = None,
) -> Engine:
    """An engine over `model`, which it makes attend through kvq; `backends`: those of its ops."""
    attention.install(model)
    shape = geometry(model.config.to_dict())
    options = ServeOptions(
        "tiny",
        page_tokens=page_tokens,
        max_running_requests=max_running_requests,
        max_prefill_tokens=max_prefill_tokens,
        cache_type=cache_type,
        state_snapshots=state_snapshots,
        attention_backend=attention_backend,
        prefill_reads=prefill_reads,
        prefill_scratch_mb=prefill_scratch_mb,
        cuda_graph_max_bs=cuda_graph_max_bs,
        cuda_graph_max_prefill_tokens=cuda_graph_max_prefill_tokens,
    )
    device, dtype = next((p.device, p.dtype) for p in model.parameters())
    choice = choose_cache(cache, shape, options, device, dtype)
    if backends is not None:
        choice = replace(choice, backends=backends)
    return assemble(
        model,
        tokenizer or Letters(),
        shape,
        choice,
        options,
        num_pages=num_pages,
        context=max_model_len or shape.max_position,
    )


def make_async_engine(engine: Engine) -> AsyncEngine:
    """The engine behind an event loop."""

    def summarize(engine: Engine) -> EngineSummary:
        cache = engine.cache
        return EngineSummary(
            model_name="tiny",
            cache_dtype=cache.choice.cache_dtype,
            bytes_per_token=cache.pool.plan.token_bytes,
            bf16_bytes_per_token=1.0,
            page_tokens=cache.pool.plan.page_tokens,
            num_tokens=cache.num_tokens,
            bf16_num_tokens=0,
            max_model_len=engine.max_model_len,
            cache_bytes=cache.pool.nbytes,
            attention=cache.choice.backends.by_op(),
            weights="tiny",
            prefix_cache=cache.space.prefix_cache,
        )

    return AsyncEngine(engine, summarize)


def record_logits(engine: Engine) -> list[torch.Tensor]:
    """A list that grows by the logits of each step."""
    seen: list[torch.Tensor] = []
    forward = engine.runner.forward

    def recorded(step: Any) -> torch.Tensor:
        seen.append(forward(step))
        return seen[-1]

    engine.runner.forward = recorded  # type: ignore[method-assign]
    return seen


def random_prompt(length: int, seed: int = 0) -> list[int]:
    """Tokens none of which ends a text."""
    rng = random.Random(length * 1000 + seed)
    return [rng.randrange(1, VOCABULARY) for _ in range(length)]


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    """Greedy parameters that run to the end."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **options)


def run(
    engine: Engine, requests: dict[str, tuple[Sequence[int], SamplingParams]]
) -> dict[str, list[Delta]]:
    """Add all requests, step to the end; deltas by request."""
    for name, (prompt, params) in requests.items():
        engine.add(name, prompt, params)
    out: dict[str, list[Delta]] = {name: [] for name in requests}
    while engine.has_work:
        for name, delta in engine.step():
            out[name].append(delta)
        engine.cache.space.check_integrity()
    return out


def tokens_of(deltas: Sequence[Delta]) -> list[int]:
    """All generated tokens."""
    return [t for d in deltas for t in d.token_ids]


def generate(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """transformers' own greedy generation."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    ids = torch.tensor([list(prompt)], device=next(model.parameters()).device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    model.set_attn_implementation(implementation)
    return out[0, len(prompt) :].tolist()
