"""The cache of a running engine: its memory and its pages, which change size together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvq_attention.support import Choice
from kvq_cli.engine.params import AttentionCheck, Stored, TierStats
from kvq_cli.engine.request import Request
from kvq_cli.engine.states import StatePool
from kvq_pools import (
    CacheSpace,
    Pool,
    PoolPlan,
    RebuildRejected,
    Rebuilt,
    SequencePages,
    Tier,
    pages_for_tokens,
    rebuild,
)
from kvq_pools.budget import FEWEST_PAGES


@dataclass(frozen=True, slots=True)
class CacheChoice:
    """A way to store the model's keys and values that this machine can serve.

    Attributes
    ----------
    cache_dtype : a codec, or k=CODEC,v=CODEC
    backends : the attention backend of each op on it
    check : what came of trying them; None = they were not
    """

    cache_dtype: str
    plan: PoolPlan
    backends: Choice
    check: AttentionCheck | None = None

    @property
    def by_reference(self) -> bool:
        """Whether the reference computes some operation."""
        return "reference" in self.backends.by_op().values()


@dataclass(frozen=True, slots=True)
class CacheMeans:
    """What a rebuild asks of the world outside the engine.

    Attributes
    ----------
    choose : cache dtype → choice; a ValueError says why there is none
    free_bytes : bytes that a pool may take beside weights and all that is allocated now; below 0
        where weights in mapped files, which take none until they are read, have no room
    workspace_bytes : choice, longest request (tokens) → bytes that computing takes at its peak
    host_free_bytes : bytes of host memory that copies of live pages may take meanwhile
    shared : whether host and pool memory are the same
    """

    choose: Callable[[str], CacheChoice]
    free_bytes: Callable[[], int]
    workspace_bytes: Callable[[CacheChoice, int], int]
    host_free_bytes: Callable[[], int]
    shared: bool


class LiveCache:
    """A pool and the space of its pages."""

    def __init__(
        self,
        pool: Pool,
        choice: CacheChoice,
        means: CacheMeans,
        *,
        step_tokens: int,
        prefix_cache: bool,
        namespace: str,
        longest: int | None = None,
        states: StatePool | None = None,
    ) -> None:
        """A cache of empty pages.

        Parameters
        ----------
        step_tokens : most tokens of one request in one step
        namespace : the model's own
        longest : the request that memory to compute was left for; None = any that pages hold
        """
        self.pool = pool
        self.choice = choice
        self.step_tokens = step_tokens
        self.space = CacheSpace(
            pool.plan,
            pool.num_pages,
            prefix_cache=prefix_cache,
            namespace=namespace,
            copy_page=pool.copy_page,
            snapshots=0 if states is None else states.num_snapshots,
            save=None if states is None else states.save,
        )
        self._means = means
        self._longest = longest
        # a server that was started smaller, as its user wished, may stay so
        self._fewest_pages = min(FEWEST_PAGES, pool.num_pages)

    @property
    def num_tokens(self) -> int:
        """Tokens that fit at the same time."""
        return self.pool.num_pages * self.pool.plan.page_tokens

    @property
    def max_tokens(self) -> int | None:
        """The longest request that fits alone and can be computed beside it all; None = any."""
        limits = self._longest, self.space.max_tokens(self.step_tokens)
        return min((each for each in limits if each is not None), default=None)

    def tiers(self) -> tuple[TierStats, ...]:
        """Each tier's pages now, priced as the plan prices them."""
        plan, num_pages = self.pool.plan, self.pool.num_pages
        return tuple(
            TierStats(
                name=tier.name,
                window=tier.window,
                page_bytes=tier.page_bytes(plan.page_tokens),
                nbytes=plan.tier_bytes(tier.name, num_pages),
                pages_total=tier.pages(num_pages),
                pages_free=self.space.num_free(tier.name) - self.space.num_evictable(tier.name),
                pages_cached=self.space.num_evictable(tier.name),
                stored=self._stored(tier),
            )
            for tier in plan.tiers
            if tier.scope != "step"  # nobody owns its pages
        )

    def _stored(self, tier: Tier) -> tuple[Stored, ...]:
        plan = self.pool.plan
        pages = plan.tier_bytes(tier.name, self.pool.num_pages) // tier.page_bytes(plan.page_tokens)
        slots = tier.slots(plan.page_tokens)
        return tuple(
            Stored(slab.name, slab.spec.name, slab.layers, pages * slab.page_bytes(slots))
            for slab in tier.slabs
        )

    def check(
        self, num_tokens: int | None, cache_dtype: str | None, requests: Iterable[Request]
    ) -> tuple[CacheChoice, int]:
        """The choice and the pages of a rebuild that can be tried; `RebuildRejected` otherwise.

        Nothing is changed. `None` keeps what there is.
        """
        choice = self._choose(cache_dtype)
        pages = self._pages(num_tokens)
        self._check_memory(choice, pages)
        self._check_requests(choice.plan, pages, list(requests))
        return choice, pages

    def rebuild(
        self, choice: CacheChoice, num_pages: int, running: Sequence[SequencePages]
    ) -> Rebuilt:
        """Resize and change the layout, keeping what fits: `running` first, in this order.

        Raises `RebuildRejected` and `RebuildFailed` (the old cache serves on) and `PoolFailed`.
        """
        plan = choice.plan if choice.plan != self.pool.plan else None
        rebuilt = rebuild(self.pool, self.space, num_pages, plan=plan, running=running)
        self.choice, self._longest = choice, None  # `check` left memory for all that pages hold
        return rebuilt

    def _choose(self, cache_dtype: str | None) -> CacheChoice:
        if cache_dtype is None:
            return self.choice
        try:
            return self._means.choose(cache_dtype)
        except ValueError as error:
            raise RebuildRejected(str(error)) from error

    def _pages(self, num_tokens: int | None) -> int:
        page_tokens = self.pool.plan.page_tokens
        if num_tokens is None:
            return self.pool.num_pages
        fewest = self._fewest_pages * page_tokens
        if num_tokens < fewest:
            raise RebuildRejected(
                f"num_tokens must be at least {fewest:,}, {self._fewest_pages} of the pages of "
                f"{page_tokens:,} tokens, got {num_tokens:,}"
            )
        if num_tokens % page_tokens:
            below = num_tokens // page_tokens * page_tokens
            raise RebuildRejected(
                f"num_tokens must be a multiple of the page's {page_tokens:,} tokens, got "
                f"{num_tokens:,}; the nearest: {below:,} and {below + page_tokens:,}"
            )
        return num_tokens // page_tokens

    def _check_memory(self, choice: CacheChoice, pages: int) -> None:
        plan, old, num_tokens = choice.plan, self.pool.nbytes, pages * choice.plan.page_tokens
        staged = self._staged_bytes()  # kept in any case, should the way back be needed
        host_free = self._means.host_free_bytes()
        if staged > host_free:
            raise RebuildRejected(
                f"{staged:,} bytes of live pages must be kept in host memory meanwhile and "
                f"{host_free:,} are free; free memory or wait until requests have ended"
            )
        free = self._means.free_bytes()
        workspace = self._means.workspace_bytes(choice, num_tokens)
        aside = workspace + (staged if self._means.shared else 0)
        room = max(0, free + old - aside)
        needed = plan.nbytes(pages)
        if needed > room:
            raise RebuildRejected(
                f"a cache of {num_tokens:,} tokens in {choice.cache_dtype} needs {needed:,} bytes "
                f"({plan.page_bytes:,} a page, {plan.fixed_bytes:,} fixed) and {room:,} can be "
                f"had ({free:,} free and {old:,} of the present cache, less {aside:,} for "
                "computing and for live pages on their way); about "
                f"{plan.pages_for(room) * plan.page_tokens:,} tokens fit"
            )

    def _staged_bytes(self) -> int:
        """Bytes of the pages that hold something."""
        return sum((t.pages_total - t.pages_free) * t.page_bytes for t in self.tiers())

    def _check_requests(self, plan: PoolPlan, pages: int, requests: list[Request]) -> None:
        longest = CacheSpace(plan, pages).max_tokens(self.step_tokens)
        if longest is None:
            return
        ends = sorted(r.least_total_tokens for r in requests if r.least_total_tokens > longest)
        if not ends:
            return
        whole = pages_for_tokens(ends[-1], plan.page_tokens) * plan.page_tokens
        raise RebuildRejected(
            f"a cache of {pages * plan.page_tokens:,} tokens holds requests of up to {longest:,}, "
            f"and {len(ends):,} that run or wait may need more, up to {ends[-1]:,}; keep at least "
            f"{whole:,}, wait until they end or cancel them"
        )
