"""The pages of a pool: who has them, who may have them, what is cached in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvq_pools.check import check_space
from kvq_pools.errors import OutOfPages, PageError, PoolFailed, whole_number
from kvq_pools.nodes import token_bytes
from kvq_pools.pages import PageAllocator, pages_for_tokens
from kvq_pools.plan import PoolPlan, Tier
from kvq_pools.prefix import PrefixHit, PrefixStats, claimed, match
from kvq_pools.sequences import CopyPage, Save, SequencePages
from kvq_pools.snapshots import Snapshots, SnapshotStats
from kvq_pools.tree import PrefixTree
from kvq_pools.window import window_pages_per_request


class CacheSpace:
    """The allocators of all tiers of a pool, the sequences and the cache that hold their pages.

    Parameters
    ----------
    plan, num_pages : of the pool; `kvq_pools.rebuild` changes them together with the pool's
    prefix_cache : keep the pages of computed tokens, for whoever has the same tokens later,
        until others need the room
    namespace : what the tokens are computed with: a model, in words. Nothing is ever shared
        between layouts, namespaces and adapters: they are part of every key.
    copy_page : (tier, from page, to page) → None: the pool's. Without it only whole pages are
        shared, and a sequence forks at the end of a page alone.
    snapshots : 0 where pages are all that goes on from them needs. Else a hit ends where there is
        a snapshot, of which there are so many at most; they go when their pages do.
    save : (sequence, place) → whether it could: write what belongs to its computed tokens to a
        place, 0 … snapshots - 1

    Attributes
    ----------
    failed : why the pool has no memory any more, None while it has
    """

    def __init__(
        self,
        plan: PoolPlan,
        num_pages: int,
        *,
        prefix_cache: bool = False,
        namespace: str = "",
        copy_page: CopyPage | None = None,
        snapshots: int = 0,
        save: Save | None = None,
    ) -> None:
        self.plan = plan
        self.num_pages = whole_number("num_pages", num_pages, 1)
        self.prefix_cache = prefix_cache
        self.namespace = namespace
        self.copy_page = copy_page
        self.save = save
        self.failed: str | None = None
        self._sequences: dict[SequencePages, None] = {}  # in the order in which they were opened
        self._allocators = {
            tier.name: PageAllocator(tier.pages(num_pages))
            for tier in plan.tiers
            if tier.scope != "step"
        }
        self._tree = PrefixTree(plan, namespace, self._allocators, Snapshots(snapshots))
        self._lookups = self._queried_tokens = self._hit_tokens = 0

    def lookup(self, tokens: Sequence[int], adapter: str = "") -> PrefixHit:
        """The longest prefix of the tokens that is cached and can be used; changes nothing.

        At least one token is left to compute, no row that tokens share is cut, and every window
        finds all that it can see. Good until the next eviction. `PageError` for what is no token
        id, cache or not.
        """
        if not self.prefix_cache:
            token_bytes(tokens)
            return PrefixHit(tree=self._tree, version=self._tree.version)
        return match(self._tree, tokens, adapter, partly=self.copy_page is not None)

    def open(
        self, tokens: Sequence[int] = (), adapter: str = "", *, count: bool = True
    ) -> SequencePages:
        """A new sequence, which has computed already what `lookup` finds of its tokens.

        Whole pages are shared; of a page used in part it gets a copy. `PageError` for what is no
        token id; nothing was changed then.
        """
        self._check_usable()
        hit = self.lookup(tokens, adapter)
        sequence = SequencePages(self, adapter)
        self._sequences[sequence] = None
        if count and len(tokens):  # not again what lost its pages and comes back
            self._lookups += 1
            self._queried_tokens += len(tokens)
            self._hit_tokens += hit.num_tokens
            self._tree.snapshots.missed_tokens += hit.matched - hit.num_tokens
        if hit.num_tokens:
            self._tree.tick()
            whole = len(hit.nodes) * self.plan.page_tokens
            sequence._start(hit, token_bytes(tokens[whole : hit.num_tokens]))
        return sequence

    def num_free(self, tier: str) -> int:
        """Pages of a tier that can be had: free or cached for nobody; KeyError if none such."""
        if tier in self._tree.tiers:
            return self._tree.num_free(self._tree.tiers.index(tier))
        return self._allocator(tier).num_free

    def num_cached(self, tier: str) -> int:
        """Pages of a tier in the prefix cache, used by sequences or not; KeyError if none such."""
        self._allocator(tier)
        tiers = self._tree.tiers
        return self._tree.num_cached(tiers.index(tier)) if tier in tiers else 0

    def num_evictable(self, tier: str) -> int:
        """Pages of a tier that only the prefix cache needs; `num_free` counts them too."""
        self._allocator(tier)
        tiers = self._tree.tiers
        return self._tree.num_evictable(tiers.index(tier)) if tier in tiers else 0

    def fits(self, num_tokens: int, step_tokens: int = 1) -> bool:
        """Whether a sequence of that length fits the empty pool, computed in such steps."""
        return all(
            self._most_pages(tier, num_tokens, step_tokens) <= tier.pages(self.num_pages)
            for tier in self._tiers()
        )

    def max_tokens(self, step_tokens: int = 1) -> int | None:
        """Length of the longest sequence that `fits`; None when windows let any length fit."""
        page_tokens, limits = self.plan.page_tokens, []
        for tier in self._tiers():
            pages = tier.pages(self.num_pages)
            whole_number("step_tokens", step_tokens, 1)
            slides = tier.window is not None and (
                window_pages_per_request(tier.window, step_tokens, page_tokens) <= pages
            )
            if tier.scope == "position" and not slides:
                limits.append(pages * page_tokens)
        return min(limits, default=None)

    def can_open(
        self,
        num_tokens: int,
        step_tokens: int = 1,
        hit: PrefixHit | None = None,
        *,
        promised: Iterable[tuple[SequencePages, int]] = (),
    ) -> bool:
        """Whether a new sequence can reach that length with the pages that can be had now.

        Parameters
        ----------
        num_tokens : the length, in whole pages
        step_tokens : most tokens that a sequence grows by before each `advance`
        hit : what this space's `lookup` found of its tokens, just now
        promised : (sequence, length) that must be reached beside it, each in whole pages
        """
        whole_number("num_tokens", num_tokens)
        hit = hit or PrefixHit(tree=self._tree, version=self._tree.version)
        if hit.tree is not self._tree:
            raise PageError(
                "the hit is of another space, or from before a rebuild; look the tokens up again"
            )
        if hit.version != self._tree.version:
            raise PageError("the cache dropped pages since this hit; look the tokens up again")
        if num_tokens < hit.num_tokens:
            raise PageError(
                f"num_tokens is {num_tokens}, yet the hit has {hit.num_tokens} of them; give the "
                "length of the whole sequence"
            )
        claims = dict(zip(self._tree.tiers, claimed(self._tree, hit), strict=True))
        promises = list(promised)
        for sequence, _ in promises:
            self._check_mine(sequence)
        for tier in self._tiers():
            most = self._most_pages(tier, num_tokens, step_tokens)
            if tier.scope == "position":
                new = pages_for_tokens(num_tokens, self.plan.page_tokens) - len(hit.nodes)
                # a window page that is let go may be had again, a shared one of others may not
                needed = new + claims[tier.name]
                if tier.window is None:
                    most = needed
                else:  # those promised count on their pages again, which the hit holds on to
                    kept = self._seen(tier, hit)
                    lent = sum(len(kept & self._alone(sequence, tier)) for sequence, _ in promises)
                    most = min(most, needed + lent)
            for sequence, length in promises:
                most += self._still_needed(sequence, tier, length, step_tokens)
            if most > self.num_free(tier.name):
                return False
        return True

    def can_grow(self, sequence: SequencePages, num_tokens: int) -> bool:
        """Whether `sequence.grow(num_tokens)` would succeed now."""
        self._check_mine(sequence)
        return all(
            missing <= self.num_free(tier)
            for tier, missing in sequence._missing(num_tokens).items()
        )

    def drop_cached(self) -> None:
        """Forget every cached page; what running sequences computed so far is not cached later."""
        self._tree.clear()
        for sequence in self._sequences:
            sequence._path, sequence._loose = [], None

    def stats(self) -> PrefixStats:
        """How much the prefix cache was asked and had."""
        return PrefixStats(
            self._lookups, self._queried_tokens, self._hit_tokens, self._tree.evicted_pages
        )

    @property
    def num_snapshots(self) -> int:
        """How many snapshots there may be; 0 = hits need none."""
        return self._tree.snapshots.places

    def snapshot_stats(self) -> SnapshotStats:
        """What there is beside pages, and how much it was used."""
        return self._tree.snapshots.stats()

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless each page is free, cached or owned and all is in place."""
        check_space(self)

    def _tiers(self) -> list[Tier]:
        """The tiers that have an allocator."""
        return [tier for tier in self.plan.tiers if tier.scope != "step"]

    def _allocator(self, tier: str) -> PageAllocator:
        self.plan.tier(tier)
        try:
            return self._allocators[tier]
        except KeyError:
            raise KeyError(f"nobody owns pages of tier {tier!r}, it is of one step") from None

    def _alloc(self, tier: str, count: int) -> list[int]:
        """Pages, with one owner each; cached ones are evicted when needed."""
        if tier in self._tree.tiers:
            return self._tree.alloc(self._tree.tiers.index(tier), count)
        return self._allocators[tier].alloc(count)

    def _out_of_pages(self, needed: int, tier: str, goal: str) -> OutOfPages:
        total = self._allocators[tier].num_pages
        return OutOfPages(needed, self.num_free(tier), total, f" in tier {tier!r} {goal}")

    def _most_pages(self, tier: Tier, num_tokens: int, step_tokens: int) -> int:
        """Most pages of a tier that a sequence holds at once on its way to that length."""
        whole_number("step_tokens", step_tokens, 1)
        pages = pages_for_tokens(num_tokens, self.plan.page_tokens)
        if tier.scope == "request":
            return min(pages, 1)
        if tier.window is None:
            return pages
        most = window_pages_per_request(tier.window, step_tokens, self.plan.page_tokens)
        return min(pages, most)

    def _still_needed(
        self, sequence: SequencePages, tier: Tier, num_tokens: int, step_tokens: int
    ) -> int:
        """Most pages beside those it has that a sequence needs to reach that length."""
        missing = sequence._missing(num_tokens)[tier.name]
        if tier.window is None:
            return missing
        most = self._most_pages(tier, num_tokens, step_tokens)
        return min(missing, max(0, most - len(self._alone(sequence, tier))))

    def _alone(self, sequence: SequencePages, tier: Tier) -> set[int]:
        """Pages of a window that no other sequence has: they can be had again."""
        owners = self._allocators[tier.name].owners
        cached = self._tree.window_nodes[self._tree.tiers.index(tier.name)]
        return {p for p in sequence._held(tier.name) if owners(p) == 1 + (p in cached)}

    def _seen(self, tier: Tier, hit: PrefixHit) -> set[int]:
        """Pages of a tier that who takes the hit holds."""
        number = self._tree.tiers.index(tier.name)
        first = self._tree.first_page(number, hit.num_tokens)
        return {node.pages[number] for node in hit.nodes[first:]}

    def _check_mine(self, sequence: SequencePages) -> None:
        if sequence not in self._sequences:
            raise PageError("the sequence is closed or belongs to another space")

    def _check_usable(self) -> None:
        if self.failed is not None:
            raise PoolFailed(f"{self.failed}; make a new pool and a new space")
