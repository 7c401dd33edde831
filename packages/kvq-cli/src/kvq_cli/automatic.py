"""The format that `--kv-cache-dtype auto` takes, and what is said where an asked one is too large.

The first of a ladder, from the most exact to the smallest, in which the asked context fits: codecs
as they are known, and among them what was measured of the model itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvq_attention import UnsupportedError
from kvq_cli import machine, sizing
from kvq_cli.choosing import choose_cache
from kvq_cli.config import (
    CacheFormatError,
    ConfigError,
    ModelGeometry,
    parse_formats,
    quality_notes,
)
from kvq_cli.engine.cache import CacheChoice
from kvq_cli.evaluation.evidence import HARMLESS, RUINS, Evidence, known
from kvq_cli.ladder import DEFAULT, LADDER, ordered, rung
from kvq_cli.models.source import ModelSource
from kvq_cli.models.weight_bytes import weight_bytes
from kvq_cli.serve_options import ServeOptions
from kvq_cli.sizing import Limits, Sizing
from kvq_pools import Budget, BudgetError, PoolPlan


@dataclass(frozen=True, slots=True)
class Room:
    """A model, what a user asks of its cache, and the memory for it.

    Attributes
    ----------
    limits : whose context is the longest request that is asked for
    budget : with what the weights take, or will
    evidence : what was measured of the model's formats; None = nothing
    """

    shape: ModelGeometry
    options: ServeOptions
    device: torch.device
    dtype: torch.dtype
    limits: Limits
    budget: Budget
    evidence: Evidence | None = None

    def context(self, choice: CacheChoice) -> int:
        """The longest request that such a cache can hold, up to the one asked for."""
        try:
            return self.sized(choice, self.budget).context
        except BudgetError:
            return 0

    def sized(self, choice: CacheChoice, budget: Budget) -> Sizing:
        """A pool for such a cache in a budget; `BudgetError` where there is none."""
        limits = replace(self.limits, by_reference=choice.by_reference)
        return sizing.chosen(self.shape, choice.plan, limits, budget, self.options.size_tokens)

    @property
    def asked(self) -> int:
        """Tokens of the longest request that must fit; a named cache holds no longer ones."""
        named = self.options.size_tokens
        if named is None or not self.shape.full_layers:
            return self.limits.context
        return min(self.limits.context, named)

    @property
    def context_asked(self) -> bool:
        """Whether the user named what must fit; else it is all that the model was made for."""
        return self.options.max_model_len is not None or self.options.size_tokens is not None

    def fits(self, choice: CacheChoice) -> bool:
        """Whether the longest request that is asked for does."""
        return self.context(choice) >= self.asked

    @property
    def exact(self) -> str:
        """The format of 16 bits that is nearest to what is computed."""
        return "fp16" if self.dtype == torch.float16 else "bf16"

    @property
    def candidates(self) -> tuple[str, ...]:
        """The ladder, without what is known to harm the model, and all that was measured."""
        shape = self.shape
        rows = () if self.evidence is None else self.evidence.rows
        measured = [row.format for row in rows]
        known = (
            name
            for name in LADDER
            if name in measured or not quality_notes(shape, parse_formats(name, shape))
        )
        return tuple(dict.fromkeys((self.exact, *known, *measured)))

    def default(self, served: Sequence[str]) -> str:
        """The smallest of the served rungs that is taken where nobody asked for a context."""
        if self.evidence is None:
            return DEFAULT
        rows = {name: self.evidence[name] for name in served}
        assumed = (self.exact, DEFAULT)  # harmless until they are measured
        harmless = [
            name
            for name, row in rows.items()
            if (name in assumed if row is None else row.kl <= HARMLESS)
        ]
        return harmless[-1] if harmless else self.exact

    def served(self) -> list[tuple[str, CacheChoice]]:
        """Formats that a backend serves, from the most exact to the smallest, and their caches."""
        means = self.options, self.device, self.dtype
        choices: dict[str, CacheChoice] = {}
        for name in self.candidates:
            try:
                choices[name] = choose_cache(name, self.shape, *means)
            except (CacheFormatError, UnsupportedError):
                continue
        sizes = {name: self._request_bytes(choice.plan) for name, choice in choices.items()}
        most = sizes.get(self.exact)
        rungs = [
            rung(name, size, self.evidence)
            for name, size in sizes.items()
            if name != self.exact and (most is None or size < most)
        ]
        names = [each.name for each in ordered(rungs)]
        first = [self.exact] if most is not None else []
        return [(name, choices[name]) for name in first + names]

    def _request_bytes(self, plan: PoolPlan) -> int:
        """Bytes of a cache that holds the longest request that is asked for."""
        return plan.nbytes(self.limits.request_pages(self.shape, self.asked))

    @property
    def nothing(self) -> str:
        """What holds the asked context where no rung does, in words."""
        rows = () if self.evidence is None else self.evidence.rows
        if {*LADDER} <= {*self.candidates} and all(row.kl < RUINS for row in rows):
            return "no format"
        return "no format that this model bears, as far as is known"


def room_for(
    source: ModelSource,
    shape: ModelGeometry,
    options: ServeOptions,
    device: torch.device,
    dtype: torch.dtype,
) -> Room:
    """What there is for a model whose weights are not loaded yet.

    Raises `ConfigError` for a context that the model was not made for.
    """
    context = longest_allowed(options, shape)
    ratio = options.memory_ratio or machine.MEMORY_RATIO[device.type]
    free = machine.free_bytes(device)
    weights = min(free, weight_bytes(source, dtype.itemsize))
    limits = limits_of(context, options, shape, dtype, device)
    states = limits.state_bytes(shape) + limits.snapshot_bytes(shape)
    budget = Budget(free, free - weights, ratio, other_pools_bytes=states)
    return Room(shape, options, device, dtype, limits, budget, known(source.path, shape))


def longest_allowed(options: ServeOptions, shape: ModelGeometry) -> int:
    """Longest request (tokens) that the user allows, by default the model's.

    Raises `ConfigError` where the model was not made for it.
    """
    context = options.max_model_len or shape.max_position
    if context > shape.max_position:
        raise ConfigError(
            f"max_model_len {context} exceeds the {shape.max_position} positions the model "
            f"was made for; use at most {shape.max_position}"
        )
    return context


def limits_of(
    context: int,
    options: ServeOptions,
    shape: ModelGeometry,
    dtype: torch.dtype,
    device: torch.device,
) -> Limits:
    """What the options let happen at once, on a device."""
    on_host = device.type == "cpu"
    return Limits(
        context,
        options.page_tokens,
        options.max_running_requests,
        options.max_prefill_tokens,
        value_bytes=dtype.itemsize,
        on_host=on_host,
        packed_prefill=options.prefill_reads == "packed",
        scratch_bytes=options.scratch_bytes,
        graph_rows=options.graph_rows(on_host=on_host),
        graph_tokens=options.graph_tokens(shape, on_host=on_host),
        state_snapshots=options.snapshots,
    )


def automatic(room: Room) -> tuple[str, str]:
    """The format that `auto` takes, and why, in words for the user."""
    name, why = _chosen(room)
    row = None if room.evidence is None else room.evidence[name]
    if room.evidence is None or row is None:
        return name, why
    return name, f"{why}; measured on {room.evidence.source}: {row}"


def _chosen(room: Room) -> tuple[str, str]:
    served, asked = room.served(), f"{room.asked:,} tokens of context"
    taken, names = "is taken for the KV cache", [name for name, _ in served]
    fitting = next((name for name, choice in served if room.fits(choice)), None)
    default = room.default(names)
    # a rung above the default is as good as asked for
    enough = default in names and fitting in names[: names.index(default) + 1]
    if fitting is not None and fitting == names[0]:
        return fitting, f"{fitting} {taken}: {asked} fit in 16 bits a value"
    if fitting is not None and (room.context_asked or enough):
        return fitting, (
            f"{asked} do not fit in {names[0]}; {fitting} {taken}, {_merit(room, fitting)}; "
            "--kv-cache-dtype names another"
        )
    if fitting is not None or not room.context_asked or not names:
        smaller = f"; --max-model-len {room.asked} would take {fitting}" if fitting else ""
        if fitting is not None and room.evidence is not None:
            smaller += f" ({room.evidence[fitting] or 'not measured'})"
        if default == room.exact:
            return default, (
                f"{asked} do not fit in {default}; {default} {taken}: no smaller format is known "
                f"to be harmless to this model{smaller}"
            )
        return (
            default,
            f"{asked} do not fit in 16 bits a value nor in {default}; {default} {taken}{smaller}",
        )
    return names[-1], f"{asked} fit in {room.nothing}; {names[-1]}, the smallest, {taken}"


def _merit(room: Room, name: str) -> str:
    """Why the first rung that fits is taken."""
    if room.evidence is None:
        return "the most exact format in which they do"
    if room.evidence[name] is None:
        return "expected to be the most exact format in which they do; it was not measured"
    return "the nearest to fp32 of the measured formats in which they do"


def check_longest(tokens: int) -> None:
    """Raise `ConfigError` where the longest request would hold no prompt and its answer."""
    if tokens < 2:
        raise ConfigError(
            f"no request could be served: the longest would hold {tokens} token, and the shortest "
            "prompt and its answer take 2; raise max_model_len, num_tokens or num_pages"
        )


def check_context(room: Room, choice: CacheChoice) -> None:
    """Raise `ConfigError` where a request as long as the user asked for can never run.

    A context that nobody asked for is the model's own, and cut to what fits.
    """
    limits, options = room.limits, room.options
    if options.max_model_len is None:
        return
    given = f"max_model_len {options.max_model_len:,}"
    if room.asked < limits.context:
        raise ConfigError(
            f"{given} is more than the {room.asked:,} tokens that the cache was to have; make it "
            "at most as many, or the cache larger"
        )
    # Weights take less than their files say where parts of them stay unread: what is refused here
    # would not fit without any.
    free = room.budget.free_before_bytes
    if replace(room, budget=replace(room.budget, free_after_bytes=free)).fits(choice):
        return
    longest = room.context(choice)
    fitting = [name for name, other in room.served() if room.fits(other)]
    instead = f"it fits in {', '.join(fitting)}" if fitting else f"it fits in {room.nothing}"
    raise ConfigError(
        f"{given} does not fit in a cache of {choice.cache_dtype}: "
        f"{f'at most {longest:,} tokens do' if longest else 'no request does'}. With this memory "
        f"{instead}; or lower max_model_len or max_prefill_tokens, or raise memory_ratio "
        f"({room.budget.memory_ratio:g} of {room.budget.free_before_bytes:,} free bytes, less "
        f"{room.budget.weights_bytes:,} of weights)"
    )
