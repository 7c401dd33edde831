"""Engines that are about to compute the step that is timed."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig
from transformers.initialization import no_init_weights

from kvq_attention import UnsupportedError
from kvq_attention.bench.cases import Case, Extend
from kvq_attention.routes import Route
from kvq_cli import machine
from kvq_cli.automatic import longest_allowed
from kvq_cli.benching.plan import VOCABULARY, EnginePlan, RandomModel
from kvq_cli.benching.ways import check_ways
from kvq_cli.choosing import choose_cache
from kvq_cli.compose import assemble, check_graphs
from kvq_cli.config import ConfigError, check_servable, geometry
from kvq_cli.engine.engine import Engine
from kvq_cli.engine.params import SamplingParams
from kvq_cli.engine.scheduler import Schedule
from kvq_cli.models import attention
from kvq_cli.models.loader import load, read_config
from kvq_cli.models.source import resolve
from kvq_cli.serve_options import ServeOptions
from kvq_pools import Pool, pages_for_tokens

SPREAD = 0.02  # of random weights
SPARE = 8  # tokens that a request may grow by beside those that are timed


class NoText:
    """A tokenizer whose tokens are no text."""

    def decode(self, token_ids: Any, **_: Any) -> str:
        return ""

    def convert_ids_to_tokens(self, token_ids: Any, **_: Any) -> list[str]:
        return ["" for _ in token_ids]


def make_model(plan: EnginePlan) -> Any:
    """The model on its device, attending through kvq.

    What cannot be measured of it is refused before weights are made or read.
    """
    device = machine.choose_device(plan.device)
    torch.set_num_threads(machine.choose_threads(None))  # as served
    if isinstance(plan.model, RandomModel):
        positions = max(_longest(plan, case) for case in plan.cases)
        config = random_config(plan.model, positions)
        dtype = checked_dtype(plan, config, device)
        model = random_llama(config, device, dtype)
    else:
        source = resolve(plan.model)
        dtype = checked_dtype(plan, read_config(source), device)
        model = load(source, dtype=dtype, device=device).model
    attention.install(model)
    return model


def checked_dtype(plan: EnginePlan, config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    """Of the weights of a model whose cases can all be measured; what cannot is refused."""
    shape = geometry(config.to_dict())
    check_servable(shape)
    dtype = machine.choose_dtype(plan.dtype, device, config)
    extends: dict[str, None] = {}
    for case, cache in product(plan.cases, plan.formats):
        options = _options(plan, cache, case)
        check_graphs(options, device, shape)
        choice = choose_cache(cache, shape, options, device, dtype)
        extends[choice.backends.extend] = None
        tokens = case.context if isinstance(case, Extend) else _most_tokens(plan, case)
        allowed = longest_allowed(options, shape)
        if tokens > allowed:
            bound = f"the model was made for {allowed:,} positions; give"
            if plan.max_model_len is not None:
                bound = f"--max-model-len allows {allowed:,}; give more,"
            raise ConfigError(
                f"{case.name} takes requests of {tokens:,} tokens, those that steps add included, "
                f"and {bound} a shorter case, or a smaller --repeat"
            )
        needed = choice.plan.nbytes(_num_pages(options, plan, case))
        if shape.state is not None:
            requests = options.max_running_requests
            needed += requests * shape.state.request_bytes(value_bytes=dtype.itemsize)
        free = machine.free_bytes(device)
        if needed > free:
            raise ConfigError(
                f"{case.name} in {cache} takes {needed / 2**20:,.0f} MiB of cache beside the "
                f"weights, and {free / 2**20:,.0f} MiB are free: give fewer requests or shorter "
                "ones, a smaller --max-model-len if one is given, or another --kv-cache-dtype"
            )
    if plan.extend_routes:
        check_ways(plan, extends)
    return dtype


def random_config(size: RandomModel, positions: int) -> LlamaConfig:
    """Of a model of that size."""
    return LlamaConfig(
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.shape.heads,
        num_key_value_heads=size.shape.kv_heads,
        head_dim=size.shape.dim,
        vocab_size=VOCABULARY,
        max_position_embeddings=positions,
    )


def random_llama(config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> Any:
    """A model of that config, made on its device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device, no_init_weights():
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, SPREAD)
    return model.train(False)


def _most_tokens(plan: EnginePlan, case: Case | Extend) -> int:
    """Of a request; one of decodes grows."""
    return case.context + plan.repeat + SPARE


def _longest(plan: EnginePlan, case: Case | Extend) -> int:
    """Tokens of the longest request that the engine allows."""
    return max(_most_tokens(plan, case), plan.max_model_len or 0)


def _num_pages(options: ServeOptions, plan: EnginePlan, case: Case | Extend) -> int:
    """That hold the case's requests, and one of the longest that are allowed."""
    per_request = pages_for_tokens(_most_tokens(plan, case), plan.page_tokens)
    longest = pages_for_tokens(_longest(plan, case), plan.page_tokens)
    return max(options.max_running_requests * per_request, longest) + 1


def _options(plan: EnginePlan, cache: str, case: Case | Extend) -> ServeOptions:
    batch = case.batch if isinstance(case, Case) else 1
    return ServeOptions(
        "benchmark",
        kv_cache_dtype=cache,
        page_tokens=plan.page_tokens,
        max_model_len=plan.max_model_len,
        max_running_requests=batch,
        max_prefill_tokens=batch * _most_tokens(plan, case),
        attention_backend=plan.attention_backend,
        cuda_graph_max_bs=plan.graph_rows,
        cuda_graph_max_prefill_tokens=plan.graph_tokens,
        cache_type="none",
    )


class Pretending:
    """A runner that can skip what it is told to compute: the cache's rows are then zeros.

    Attributes
    ----------
    refused : why attention took no step of this kind; the engine, which would count it among
        requests that failed, goes on with logits that are zeros
    """

    def __init__(self, runner: Any) -> None:
        self.real = runner
        self.skips = True
        self.refused: UnsupportedError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    @property
    def graph_rows(self) -> int:
        """As the real one's; nothing runs ahead of a step that is skipped."""
        return 0 if self.skips else self.real.graph_rows

    def forward(self, step: Schedule) -> torch.Tensor:
        """Logits of each request, zeros where the step is skipped or refused."""
        if self.skips:
            if self.real.states is not None:  # what comes after goes on from states, of zeros
                self.real.states.begin([(request, 1) for request in step.decodes], step.extends)
        else:
            try:
                logits: torch.Tensor = self.real.forward(step)
                return logits
            except UnsupportedError as error:
                self.refused = error
        vocabulary = self.real.geometry.vocab_size
        return torch.zeros(len(step.work), vocabulary, device=self.real.device)


def make_engine(model: Any, plan: EnginePlan, cache: str, case: Case | Extend) -> Engine:
    """An engine with room for a case, of which everything is zero."""
    options = _options(plan, cache, case)
    shape = geometry(model.config.to_dict())
    device, dtype = next((p.device, p.dtype) for p in model.parameters())
    choice = choose_cache(cache, shape, options, device, dtype)
    engine = assemble(
        model,
        NoText(),
        shape,
        choice,
        options,
        num_pages=_num_pages(options, plan, case),
        context=_longest(plan, case),
    )
    if plan.graph_tokens is None and isinstance(case, Extend):
        engine.runner.narrow_prompts()  # as served
    _clear(engine.cache.pool)
    runner: Any = Pretending(engine.runner)
    engine.runner = engine.computing.runner = runner
    return engine


def _clear(pool: Pool) -> None:
    for slab in (slab for tier in pool.plan.tiers for slab in tier.slabs):
        for layer in slab.layers:
            for plane in pool.view(slab.name, layer).planes.values():
                plane.zero_()


def about_to_decode(engine: Engine, case: Case, repeat: int) -> None:
    """All requests have all tokens but the next; their prompts were not computed."""
    _add(engine, case.batch, case.context, repeat)
    runner: Any = engine.runner
    while engine.scheduler.waiting or not all(r.decoding for r in engine.scheduler.running):
        engine.step()
    runner.skips = False


def about_to_extend(engine: Engine, case: Extend, route: Route | None = None) -> None:
    """The prompt is computed, as it were, but for its last tokens.

    route : by which they will read what is before them; None = as the backend chooses
    """
    runner: Any = engine.runner
    runner.skips, runner.real.extend_route = True, route
    _add(engine, 1, case.context, 1)
    if case.past:
        engine.scheduler.max_prefill_tokens = case.past
        engine.step()
    engine.scheduler.max_prefill_tokens = case.tokens
    runner.skips = False


def _add(engine: Engine, count: int, tokens: int, new: int) -> None:
    draw = random.Random(count)
    params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    for i in range(count):
        prompt = [draw.randrange(5, engine.runner.geometry.vocab_size) for _ in range(tokens)]
        engine.add(str(i), prompt, params)
