"""What a memory budget holds of a model in each cache format."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import kvq_codecs
from kvq_cli import sizing
from kvq_cli.config import (
    CacheFormat,
    CacheFormatError,
    ConfigError,
    Formats,
    ModelGeometry,
    build_plan,
    check_format,
)
from kvq_cli.sizing import Limits, Sizing
from kvq_pools import Budget, BudgetError, PoolPlan, first_visible, pages_for_tokens
from kvq_pools.budget import FEWEST_PAGES

BASELINE = CacheFormat("bf16", "bf16")
# Formats that differ for keys and values, as people use them: keys are the ones that mind.
MIXES = (
    CacheFormat("q8_0", "q6_0"),
    CacheFormat("q8_0", "q4_0"),
    CacheFormat("q6_0", "q4_0"),
    CacheFormat("fp8", "nvfp4"),
    CacheFormat("q8_0", "iso4"),
)


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the budget holds in one format, on one rank.

    Attributes
    ----------
    token_bytes : of one more token, in the tiers that grow
    token_bytes_by_tier : of one token in each tier of positions, fixed ones included
    page_bytes_by_tier : of one page
    fixed_bytes, state_bytes, snapshot_bytes, workspace_bytes : that the number of tokens does not
        change
    tokens : that fit at the same time; 0 when the budget is too small for this format
    context : longest request
    limit : what bounds it: "memory" or the model's "positions"
    requests : how many of each length fit at once; None where the model has fewer positions
    """

    formats: Formats
    token_bytes: float
    token_bytes_by_tier: dict[str, float]
    page_bytes_by_tier: dict[str, int]
    fixed_bytes: int
    state_bytes: int
    snapshot_bytes: int
    workspace_bytes: int
    tokens: int
    context: int
    limit: str
    requests: dict[int, int | None]

    @property
    def tokens_per_gib(self) -> int:
        """Whole tokens in one GiB of pages."""
        return int(2**30 / self.token_bytes)


@dataclass(frozen=True, slots=True)
class Pages:
    """How full a request leaves the pages of a tier.

    Attributes
    ----------
    page_tokens : tokens of a page
    waste : share of the slots of a request's pages that no later query reads, by its length;
        None where the model has fewer positions
    """

    tier: str
    page_tokens: int
    waste: dict[int, float | None]


@dataclass(frozen=True, slots=True)
class Planner:
    """What is asked about a model.

    Attributes
    ----------
    budget_bytes : of one rank, for cache, states and workspace; weights are not in it
    limits : whose context is the model's longest sequence
    lengths : tokens of the requests that are counted
    """

    model: ModelGeometry
    budget_bytes: int
    limits: Limits
    lengths: tuple[int, ...]

    def formats(self) -> tuple[CacheFormat, ...]:
        """Every codec and the mixes, as far as they store the model's rows."""
        codecs = (CacheFormat(name, name) for name in kvq_codecs.names())
        return tuple(cache for cache in (*codecs, *MIXES) if self._stores(cache))

    def capacities(self, formats: Iterable[Formats]) -> list[Capacity]:
        """One each. `ConfigError` when the budget is too small for all of them."""
        found = [self.capacity(each) for each in formats]
        if not any(each.tokens for each in found):
            needed, least = min((self._least(each), str(each.formats)) for each in found)
            raise ConfigError(
                f"a budget of {self.budget_bytes:,} bytes holds no cache in any format: the "
                f"smallest, of {least}, takes {needed:,} with its workspace; give more, lower "
                "max_running_requests or max_prefill_tokens, or say the workspace if you know it"
            )
        return found

    def capacity(self, formats: Formats) -> Capacity:
        """What the budget holds in a format."""
        plan, limits = self.plan(formats), self.limits
        try:
            size = self._size(formats)
        except BudgetError:
            size = Sizing(0, 0, limits.needs(self.model, limits.page_tokens))
        return Capacity(
            formats=formats,
            token_bytes=plan.token_bytes,
            token_bytes_by_tier=plan.token_bytes_by_tier,
            page_bytes_by_tier={t.name: t.page_bytes(plan.page_tokens) for t in plan.tiers},
            fixed_bytes=plan.fixed_bytes,
            state_bytes=limits.state_bytes(self.model),
            snapshot_bytes=limits.snapshot_bytes(self.model),
            workspace_bytes=size.workspace_bytes,
            tokens=size.pages * plan.page_tokens,
            context=size.context,
            limit="memory" if size.context < limits.context else "positions",
            requests={length: self._requests(formats, length) for length in self.lengths},
        )

    def plan(self, formats: Formats, max_running_requests: int | None = None) -> PoolPlan:
        """The pool in a format; for another number of requests, if asked."""
        limits = self.limits
        return build_plan(
            self.model,
            formats,
            page_tokens=limits.page_tokens,
            max_running_requests=max_running_requests or limits.max_running_requests,
            max_prefill_tokens=limits.max_prefill_tokens,
            ranks=limits.ranks,
        )

    def pages(self) -> list[Pages]:
        """The tiers of positions, whatever the format."""
        plan = self.plan(self.formats()[0])
        return [
            Pages(
                tier.name,
                plan.page_tokens,
                {
                    n: _waste(n, tier.window, plan.page_tokens)
                    if n <= self.limits.context
                    else None
                    for n in self.lengths
                },
            )
            for tier in plan.tiers
            if tier.scope == "position"
        ]

    def _size(self, formats: Formats) -> Sizing:
        free, model, limits = self.budget_bytes, self.model, self.limits
        states = limits.state_bytes(model) + limits.snapshot_bytes(model)
        budget = Budget(free, free, 1.0, other_pools_bytes=states)
        return sizing.largest(self.model, self.plan(formats), self.limits, budget)

    def _requests(self, formats: Formats, length: int) -> int | None:
        """Most requests of a length, each with its pages, window, state and share of workspace."""
        if length > self.limits.context:
            return None
        each = self.limits.request_pages(self.model, length)

        def fits(requests: int) -> bool:
            limits = replace(self.limits, max_running_requests=requests)
            cache = self.plan(formats, requests).nbytes(requests * each)
            states = limits.state_bytes(self.model) + limits.snapshot_bytes(self.model)
            return cache + states + limits.needs(self.model, length) <= self.budget_bytes

        fewest = 0  # fits; `most` does not
        most = 1 + self.budget_bytes // (each * self.plan(formats).page_bytes)
        while most - fewest > 1:
            middle = (fewest + most) // 2
            fewest, most = (middle, most) if fits(middle) else (fewest, middle)
        return fewest

    def _least(self, capacity: Capacity) -> int:
        cache = self.plan(capacity.formats).nbytes(FEWEST_PAGES)
        states = capacity.state_bytes + capacity.snapshot_bytes
        return cache + states + capacity.workspace_bytes

    def _stores(self, cache: CacheFormat) -> bool:
        try:
            check_format(self.model, cache)
        except CacheFormatError:
            return False
        return True


def _waste(num_tokens: int, window: int | None, page_tokens: int) -> float:
    """Share of the slots in a request's pages that hold nothing a later query reads."""
    # the next query's own position is not stored yet
    first = 0 if window is None else first_visible(num_tokens, window)
    pages = pages_for_tokens(num_tokens, page_tokens) - first // page_tokens
    return 1 - (num_tokens - first) / (pages * page_tokens)
