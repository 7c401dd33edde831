"""A pool of another size or plan under the sequences and the cached pages that live in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvq_pools.errors import PageError, RebuildRejected, whole_number
from kvq_pools.nodes import Node, root_key
from kvq_pools.pages import NO_PAGE, PageAllocator
from kvq_pools.plan import PoolPlan
from kvq_pools.pool import Pool, plan_after
from kvq_pools.sequences import SequencePages
from kvq_pools.space import CacheSpace
from kvq_pools.tree import PrefixTree


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What a rebuild had no room for.

    Attributes
    ----------
    dropped : sequences, closed; compute them again
    cached_kept, cached_dropped : tier of positions → pages of the prefix cache
    """

    dropped: list[SequencePages]
    cached_kept: dict[str, int]
    cached_dropped: dict[str, int]


def rebuild(
    pool: Pool,
    space: CacheSpace,
    num_pages: int,
    *,
    plan: PoolPlan | None = None,
    running: Sequence[SequencePages] = (),
) -> Rebuilt:
    """Rebuild a pool and give everything that lives in it its new pages, between two steps.

    Sequences come first, those of `running` in that order, then the others; each keeps all its
    pages or is dropped. Cached pages follow, the most recently used first. Bytes laid out
    otherwise, or another window or page size, keep nothing.

    Raises what `Pool.rebuild` does, and `PageError` for a pool or sequences that are not the
    space's. After `RebuildRejected` and `RebuildFailed` nothing has changed; after `PoolFailed`
    the space refuses all work.
    """
    space._check_usable()
    after = plan_after(space.plan, plan)
    whole_number("num_pages", num_pages, 1, RebuildRejected)
    if (pool.plan, pool.num_pages) != (space.plan, space.num_pages):
        raise PageError("the pool has another plan or size than the space; they do not belong")
    order = list(dict.fromkeys([*running, *space._sequences]))
    if len(order) > len(space._sequences):
        raise PageError("a sequence to keep is closed or belongs to another space")
    survivors = _Survivors(space, after, num_pages)
    if root_key(after, "", "") == root_key(space.plan, "", ""):
        survivors.choose(order)
    try:
        pool.rebuild(num_pages, plan=plan, live=_owned(space), keep=survivors.moves)
    except BaseException:
        space.failed = pool.failed
        raise
    return survivors.move_in(order)


def _owned(space: CacheSpace) -> dict[str, list[int]]:
    """All pages that sequences or the cache own."""
    tiers = space._allocators.items()
    return {t: [p for p in range(a.num_pages) if a.owners(p)] for t, a in tiers}


class _Survivors:
    """Who stays in a pool of another size; decided first, done when the pool has it."""

    def __init__(self, space: CacheSpace, plan: PoolPlan, num_pages: int) -> None:
        self.space = space
        self.plan = plan
        self.num_pages = num_pages
        self.room = {t.name: t.pages(num_pages) for t in plan.tiers if t.scope != "step"}
        self.moves: dict[str, dict[int, int]] = {}  # tier → page now → page after
        self.sequences: dict[SequencePages, None] = {}
        self.nodes: dict[Node, None] = {}

    def choose(self, order: Sequence[SequencePages]) -> None:
        """Keep what there is room for: sequences, then cached pages."""
        self.moves = {tier: {} for tier in self.room}
        for sequence in order:
            if self._keep({tier: sequence._held(tier) for tier in self.room}):
                self.sequences[sequence] = None
        tree = self.space._tree
        # Parents come before children: they were made before them, and what nobody holds was not
        # used after its parent. So a node whose page has a place has its parents in theirs.
        last = tree.clock + 1
        by_use = sorted(tree.nodes.values(), key=lambda n: -last if n.holders else -n.used)
        full = [(i, t) for i, t in enumerate(tree.tiers) if i not in tree.windows]
        for node in by_use:
            if self._keep({tier: [node.pages[i]] for i, tier in full}):
                self.nodes[node] = None
        for i in tree.windows:
            oldest = [page for page, _ in tree.let_go[i].in_order()]
            others = [page for page in tree.window_nodes[i] if page not in tree.let_go[i]]
            for page in [*others, *reversed(oldest)]:
                if tree.window_nodes[i][page] in self.nodes:
                    self._keep({tree.tiers[i]: [page]})

    def _keep(self, pages: Mapping[str, Sequence[int]]) -> bool:
        """Places for pages, in all tiers or in none."""
        new = {t: [p for p in pages[t] if p not in self.moves[t]] for t in pages}
        if any(len(self.moves[t]) + len(new[t]) > self.room[t] for t in new):
            return False
        for tier, moves in new.items():
            for page in moves:
                self.moves[tier][page] = len(self.moves[tier])
        return True

    def move_in(self, order: Sequence[SequencePages]) -> Rebuilt:
        """Give all that stays its new pages; close the other sequences."""
        space, tree = self.space, self.space._tree
        cached = {tier: tree.num_cached(i) for i, tier in enumerate(tree.tiers)}
        dropped = [sequence for sequence in order if sequence not in self.sequences]
        allocators = {tier: PageAllocator(pages) for tier, pages in self.room.items()}
        tree.tick()
        for sequence in dropped:
            for node in sequence._path:
                node.used = tree.clock
            sequence._end()
        space.plan, space.num_pages, space._allocators = self.plan, self.num_pages, allocators
        if not self.moves:
            tree.snapshots.retain(())
            space._tree = PrefixTree(self.plan, tree.namespace, allocators, tree.snapshots)
            space._tree.version = tree.version + 1
            space._tree.evicted_pages = tree.evicted_pages
        else:
            self._renumber(allocators)
        kept = {t: space.num_cached(t) if t in space._tree.tiers else 0 for t in cached}
        return Rebuilt(dropped, kept, {tier: cached[tier] - kept[tier] for tier in cached})

    def _renumber(self, allocators: Mapping[str, PageAllocator]) -> None:
        """Give tables and nodes the pages after, and the allocators their counts."""
        tree = self.space._tree
        queued = {i: queue.in_order() for i, queue in tree.let_go.items()}
        owned: dict[str, list[int]] = {tier: [] for tier in self.moves}
        self._move_nodes(allocators)
        for i, tier in enumerate(tree.tiers):
            owned[tier] += [n.pages[i] for n in self.nodes if n.pages[i] != NO_PAGE]
        for sequence in self.sequences:
            for tier, moves in self.moves.items():
                table = sequence.tables[tier]
                table[:] = [page if page == NO_PAGE else moves[page] for page in table]
                owned[tier] += sequence._held(tier)
            tree.hold(sequence._path)
        for tier, allocator in allocators.items():
            more = Counter(owned[tier])
            more.subtract(allocator.alloc(len(self.moves[tier])))
            allocator.retain(more.elements())
        self._queue(queued)

    def _move_nodes(self, allocators: Mapping[str, PageAllocator]) -> None:
        """Leave those that stay in the tree, with their new pages and without holders."""
        tree = self.space._tree
        nodes, roots = tree.nodes, tree.roots
        tree.plan = self.plan
        tree.allocators = [allocators[tier] for tier in tree.tiers]
        tree.snapshots.retain(self.nodes)
        tree.reset()
        for node in nodes.values():
            if node in self.nodes:
                places = zip(tree.tiers, node.pages, strict=True)
                node.pages = [self.moves[tier].get(page, NO_PAGE) for tier, page in places]
                node.holders = 0
                tree.nodes[node.key] = node
            else:
                node.pages = [NO_PAGE] * len(node.pages)
                node.unlink()
        tree.roots = {adapter: root for adapter, root in roots.items() if root.children}
        tree.unheld = len(tree.nodes)

    def _queue(self, queued: Mapping[int, Sequence[tuple[int, bool]]]) -> None:
        """Queue what can be evicted: window pages in the order of before, and leaves."""
        tree = self.space._tree
        for i, old in queued.items():
            nodes = {n.pages[i]: n for n in tree.nodes.values() if n.pages[i] != NO_PAGE}
            tree.window_nodes[i] = nodes
            moves = self.moves[tree.tiers[i]]
            order = {moves[page]: passed for page, passed in old if page in moves}
            order |= {page: False for page in nodes if page not in order}  # of who was dropped
            for page, passed in order.items():
                if page in nodes and tree.allocators[i].owners(page) == 1:
                    tree.let_go[i].push(page, passed=passed)
        for node in [*tree.nodes.values()]:
            if not node.holders and node.key in tree.nodes:
                tree.settle(node)
