"""A tiny evaluation, and the same figures from transformers alone."""

from __future__ import annotations

import inspect
import random
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_models import Letters, llama
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import kvq_codecs
from kvq_cli.choosing import choose_cache
from kvq_cli.config import geometry
from kvq_cli.evaluation.session import EvalOptions, Session, wanted_formats
from kvq_cli.evaluation.texts import Text
from kvq_cli.models import attention
from kvq_cli.models.loader import LoadedModel

CONTEXT = 160


class Words(Letters):
    """Single characters as tokens, with a beginning of its own if it is given one."""

    def __init__(self, begin: int | None = None) -> None:
        self.bos_token_id = begin

    def encode(self, text: str, *, add_special_tokens: bool = True, **_: Any) -> list[int]:
        start = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        return [*start, *super().encode(text)]


def letters(length: int, seed: int = 0) -> Text:
    """A text of random letters and blanks."""
    rng = random.Random(seed)
    return Text("letters", "".join(rng.choice(string.ascii_letters + " ") for _ in range(length)))


def outlying(head_dim: int = 32) -> LlamaForCausalLM:
    """A tiny llama whose key projections have a bias that is large on one channel in 32."""
    torch.manual_seed(0)
    config = llama(head_dim=head_dim).config.to_dict()
    config |= {"attention_bias": True, "initializer_range": 0.1}
    model = LlamaForCausalLM(LlamaConfig(**config)).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.zero_()[::32] = 40.0
    return model


def evaluate(
    model: Any,
    *formats: str,
    text: Text | None = None,
    tokenizer: Any = None,
    record: Path | None = None,
    tell: Callable[[str, int, int], None] = lambda *_: None,
    session: Session | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The record of an evaluation in windows of 160 tokens, computed 48 at a time."""
    attention.install(model)
    shape = geometry(model.config.to_dict())
    chosen = EvalOptions(
        "tiny", Path("letters"), formats, context=CONTEXT, chunk_tokens=48, record=record, **options
    )
    device, dtype = next((p.device, p.dtype) for p in model.parameters())
    session = session or Session()
    session.evaluate(
        LoadedModel(model, tokenizer or Words(), shape, "tiny"),
        text or letters(2 * CONTEXT),
        chosen,
        wanted_formats(formats, shape),
        CONTEXT,
        lambda name: choose_cache(name, shape, chosen.served, device, dtype),
        tell,
    )
    return session.record


class RoundedCache(DynamicCache):
    """transformers' own cache, of what a codec makes of keys and values."""

    def __init__(self, config: Any, k: str, v: str) -> None:
        super().__init__(config=config)
        self._codecs = kvq_codecs.get(k), kvq_codecs.get(v)

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        k, v = (
            codec.decode(codec.encode(rows.contiguous())).to(rows.dtype)
            for codec, rows in zip(self._codecs, (key_states, value_states), strict=True)
        )
        return super().update(k, v, *args, **kwargs)


def plain_logits(model: Any, window: Sequence[int], k: str = "fp32", v: str = "fp32") -> Any:
    """Logits [tokens, vocabulary], float64, of transformers over such a cache."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        with torch.inference_mode():
            ids = torch.tensor([list(window)])
            cache = RoundedCache(model.config, k, v)
            # one argument by two names: transformers renamed it
            names = inspect.signature(model.forward).parameters
            name = "cache" if "cache" in names else "past_key_values"
            found = model(input_ids=ids, use_cache=True, **{name: cache}).logits[0]
            return found.double().numpy()
    finally:
        model.set_attn_implementation(implementation)


def plain_figures(
    model: Any, windows: Sequence[Sequence[int]], k: str, v: str
) -> tuple[float, float, float]:
    """Perplexity, mean KL against fp32 and agreement, with NumPy from transformers' logits."""
    nll, kl, agreeing = [], [], []
    for window in windows:
        exact, found = (
            _log_softmax(plain_logits(model, window, *pair)[:-1])
            for pair in (("fp32",) * 2, (k, v))
        )
        nll += [-row[token] for row, token in zip(found, window[1:], strict=True)]
        kl += [float(np.sum(np.exp(p) * (p - q))) for p, q in zip(exact, found, strict=True)]
        agreeing += [p.argmax() == q.argmax() for p, q in zip(exact, found, strict=True)]
    return float(np.exp(np.mean(nll))), float(np.mean(kl)), float(np.mean(agreeing))


def _log_softmax(logits: Any) -> Any:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
