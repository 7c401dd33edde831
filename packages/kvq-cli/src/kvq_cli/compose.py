"""Puts the parts together: options in, an engine out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kvq_cli import machine
from kvq_cli.automatic import (
    Room,
    automatic,
    check_context,
    check_longest,
    limits_of,
    room_for,
)
from kvq_cli.choosing import checked_cache, choose_cache, make_plan
from kvq_cli.config import (
    CacheFormat,
    ConfigError,
    ModelGeometry,
    check_servable,
    choose_format,
    geometry,
    parse_formats,
    quality_notes,
    rotary_notes,
    usual_requests,
)
from kvq_cli.engine.async_engine import AsyncEngine
from kvq_cli.engine.cache import CacheChoice, CacheMeans, LiveCache
from kvq_cli.engine.engine import Engine
from kvq_cli.engine.params import EngineSummary
from kvq_cli.engine.runner import ModelRunner
from kvq_cli.engine.states import StatePool
from kvq_cli.evaluation import evidence, probe
from kvq_cli.models import attention, rotary
from kvq_cli.models.compiled import compile_parts
from kvq_cli.models.convert import Progress
from kvq_cli.models.identity import identity
from kvq_cli.models.loader import LoadedModel, load, read_config
from kvq_cli.models.source import resolve
from kvq_cli.notes import attention_notes, capacity_notes, state_notes
from kvq_cli.serve_options import ServeOptions
from kvq_pools import Budget, Pool

__all__ = ["ServeOptions", "assemble", "build_engine", "choose_cache", "make_plan"]


def build_engine(
    options: ServeOptions,
    report: Callable[[str], None] = lambda _: None,
    progress: Progress | None = None,
) -> AsyncEngine:
    """An engine ready to start.

    All that can be refused is refused before weights load: `ConfigError` and its kin say what
    was given, what is allowed and what to do. `report` hears what is being done.
    """
    source = resolve(options.model)
    config = read_config(source)
    shape = geometry(config.to_dict())
    check_servable(shape)
    device = machine.choose_device(options.device)
    torch.set_num_threads(machine.choose_threads(options.threads))
    check_graphs(options, device, shape)
    dtype = machine.choose_dtype(options.dtype, device, config)
    room = room_for(source, shape, options, device, dtype)
    limits, budget = room.limits, room.budget
    cache_dtype, declared = choose_format(
        options.kv_cache_dtype, config.to_dict(), lambda: automatic(room)
    )
    choice = choose_cache(cache_dtype, shape, options, device, dtype)
    # what does not fit without weights will not fit beside them
    bare = replace(budget, free_after_bytes=budget.free_before_bytes)

    def check_room(choice: CacheChoice) -> None:
        check_longest(room.sized(choice, bare).context)
        check_context(room, choice)

    check_room(choice)

    for note in (*declared, *evidence.notes(source.path, shape)):
        report(note)
    report(f"attention: {choice.backends}")
    choice = checked_cache(choice, shape, options, device, dtype)
    report(f"attention {_checked(choice)}")
    check_room(choice)  # what took a kernel's place may need more
    report(f"loading {source.name} ({options.model})")
    loaded = load(source, dtype=dtype, device=device, progress=progress)
    measured = replace(budget, free_after_bytes=_left(budget, loaded, device))
    size = room.sized(choice, measured)
    check_longest(size.context)
    attention.install(loaded.model)
    rotary.settle(loaded.model, limits.context)
    harm = _harm(room, loaded, choice)
    machine.trim()
    if options.compile:
        parts = compile_parts(loaded.model)
        report(f"{parts} parts of the model are compiled when they are first used")
    name = options.served_model_name or loaded.name
    engine = assemble(
        loaded.model,
        loaded.tokenizer,
        loaded.geometry,
        choice,
        options,
        num_pages=size.pages,
        context=limits.context,
        longest=size.context,
        namespace=identity(source.path) or name,
    )

    _prepare(engine.runner, options, report)

    def summarize(engine: Engine) -> EngineSummary:
        cache = engine.cache
        formats = parse_formats(cache.choice.cache_dtype, shape)
        bf16 = make_plan(shape, CacheFormat("bf16", "bf16"), options)
        return EngineSummary(
            model_name=name,
            cache_dtype=cache.choice.cache_dtype,
            bytes_per_token=cache.pool.plan.token_bytes,
            bf16_bytes_per_token=bf16.token_bytes,
            page_tokens=options.page_tokens,
            num_tokens=cache.num_tokens,
            bf16_num_tokens=bf16.pages_for(cache.pool.nbytes) * options.page_tokens,
            max_model_len=engine.max_model_len,
            cache_bytes=cache.pool.nbytes,
            attention=cache.choice.backends.by_op(),
            attention_check=cache.choice.check,
            weights=f"{dtype} on {device}".removeprefix("torch."),
            prefix_cache=cache.space.prefix_cache,
            **_states(engine.runner.states),
            prefill_reads=options.prefill_reads,
            notes=(
                *declared,
                *(harm(cache.choice.cache_dtype) or quality_notes(shape, formats)),
                *rotary_notes(shape, limits.context),
                *state_notes(shape, options),
                *attention_notes(cache.choice),
                *capacity_notes(limits.context, cache.max_tokens),
            ),
        )

    return AsyncEngine(engine, summarize)


def assemble(
    model: Any,
    tokenizer: Any,
    shape: ModelGeometry,
    choice: CacheChoice,
    options: ServeOptions,
    *,
    num_pages: int,
    context: int,
    longest: int | None = None,
    namespace: str = "",
) -> Engine:
    """An engine over a loaded model that attends through kvq.

    Parameters
    ----------
    context : longest request (tokens) that the model and the user allow
    longest : the one that the memory beside the pool is enough for; None = all that pages hold
    """
    device, dtype = next((p.device, p.dtype) for p in model.parameters())
    limits = limits_of(context, options, shape, dtype, device)
    rotary.settle(model, context)
    pool = Pool(
        choice.plan,
        num_pages,
        empty=lambda shape, kind: torch.empty(shape, dtype=getattr(torch, kind), device=device),
        to_host=lambda array: array.to("cpu", copy=True),
        on_free=torch.cuda.empty_cache if device.type == "cuda" else lambda: None,
    )

    def choose(cache_dtype: str) -> CacheChoice:
        chosen = choose_cache(cache_dtype, shape, options, device, dtype)
        return checked_cache(chosen, shape, options, device, dtype)

    mapped = machine.mapped_bytes(model.parameters())
    means = CacheMeans(
        choose=choose,
        free_bytes=lambda: machine.free_bytes(device, mapped),
        workspace_bytes=lambda chosen, longest: replace(
            limits, by_reference=chosen.by_reference
        ).needs(shape, min(context, longest)),
        host_free_bytes=lambda: max(0, machine.free_bytes(torch.device("cpu"), mapped)),
        shared=device.type == "cpu",
    )
    running, snapshots, states = options.max_running_requests, options.snapshots, None
    if shape.state is not None:
        states = StatePool(shape.state, running, snapshots, device=device, dtype=dtype)
    cache = LiveCache(
        pool,
        choice,
        means,
        step_tokens=options.max_prefill_tokens,
        # pages hold no states: without a snapshot nobody goes on from them
        prefix_cache=options.cache_type == "prefix" and (states is None or snapshots > 0),
        namespace=namespace,
        longest=longest,
        states=states,
    )
    return Engine(
        ModelRunner(
            model,
            shape,
            pool,
            backends=choice.backends,
            prefill_reads=options.prefill_reads,
            scratch_bytes=options.scratch_bytes,
            graph_rows=limits.graph_rows,
            graph_tokens=limits.graph_tokens,
            usual_requests=usual_requests(options.max_running_requests),
            states=states,
        ),
        cache,
        tokenizer,
        context_tokens=context,
        max_running_requests=options.max_running_requests,
    )


def _left(budget: Budget, loaded: LoadedModel, device: torch.device) -> int:
    """Bytes that are free beside a loaded model.

    On a CPU weights may be a file that is mapped, which the system counts as memory that could be
    had until they are read, and again as soon as they have been. A step reads all of them.
    """
    free = machine.free_bytes(device)
    if device.type != "cpu":
        return free
    return min(free, max(0, budget.free_before_bytes - loaded.weight_bytes))


def _harm(room: Room, loaded: LoadedModel, choice: CacheChoice) -> Callable[[str], tuple[str, ...]]:
    """Format → what is known of its harm to the model, by its evaluation or tried on the spot."""
    measured, shape, name = room.evidence, room.shape, choice.cache_dtype
    if measured is not None and measured[name] is not None:
        return measured.warnings
    # by the reference: what is tried is the format, and kernels for it take long to compile
    tried = replace(
        room.options,
        attention_backend="reference",
        prefill_reads="packed",
        cuda_graph_max_prefill_tokens=0,
        max_running_requests=1,
        max_prefill_tokens=probe.TOKENS,
    )
    found = probe.warnings(
        loaded,
        parse_formats(name, shape),
        lambda each: choose_cache(each, shape, tried, room.device, room.dtype),
        chunk_tokens=probe.TOKENS,
    )

    def of(other: str) -> tuple[str, ...]:
        known = measured.warnings(other) if measured is not None else ()
        return known or (found if other == name else ())

    return of


def check_graphs(options: ServeOptions, device: torch.device, shape: ModelGeometry) -> None:
    """`ConfigError` where CUDA graphs are asked for and cannot be had."""
    for name in ("cuda_graph_max_bs", "cuda_graph_max_prefill_tokens"):
        asked = getattr(options, name)
        if asked and device.type != "cuda":
            raise ConfigError(
                f"{name} {asked} asks for CUDA graphs, and the device is {device}; leave it out, "
                "or serve on a GPU"
            )
    tokens = options.cuda_graph_max_prefill_tokens
    if tokens and shape.state is not None:
        raise ConfigError(
            f"cuda_graph_max_prefill_tokens {tokens} asks for CUDA graphs, and this "
            f"{shape.model_type} model has linear-attention layers, whose states a graph of a "
            "prompt does not follow; use 0"
        )


def _prepare(runner: ModelRunner, options: ServeOptions, report: Callable[[str], None]) -> None:
    """Make graphs before requests wait for them."""
    if not (runner.graph_rows or runner.graph_tokens):
        return
    report("making CUDA graphs, and at the first start their kernels")
    if options.cuda_graph_max_prefill_tokens is None:
        runner.narrow_prompts()
    decodes, prompts = runner.prepare()
    chunks = f"{prompts} of prompts' chunks of up to {runner.graph_tokens} tokens"
    report(f"CUDA graphs made: {decodes} of decodes, {chunks if prompts else 'none of prompts'}")


def _checked(choice: CacheChoice) -> str:
    """What the check found, in words that follow `attention`."""
    assert choice.check is not None
    instead = "".join(f"; {words}" for words in choice.check.fallbacks)
    return f"checked: {choice.check}{instead}"


def _states(states: StatePool | None) -> dict[str, int]:
    """What a summary says of them."""
    if states is None:
        return {}
    return {
        "state_bytes": states.request_bytes,
        "states": states.num_requests,
        "snapshots": states.num_snapshots,
    }
