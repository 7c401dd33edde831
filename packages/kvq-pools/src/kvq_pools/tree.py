"""The pages that the prefix cache owns, in a tree of their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from kvq_pools.lru import Leaves, LetGo
from kvq_pools.nodes import Node, Root, chain
from kvq_pools.pages import NO_PAGE, PageAllocator
from kvq_pools.plan import PoolPlan
from kvq_pools.snapshots import Snapshots
from kvq_pools.window import first_visible

RECENT = 16  # children of a node that are compared token by token, newest first


class PrefixTree:
    """Nodes of the pages that the cache owns, by the tokens that lead to them.

    The cache owns each page of a node once, beside the sequences. A sequence that runs through
    a node holds it, and thereby all its parents; what nobody holds is dropped from the leaves
    upward. A window page is needed by those alone whose window shows it, and may leave a node
    that stays.

    Attributes
    ----------
    tiers, allocators : of positions; tiers are numbers here, indices of these
    windows : tier → window, where there is one
    nodes : key → node; roots: adapter → root, where it has children
    unheld : nodes without holders
    snapshots : of nodes, which go with them
    version : changes whenever something is dropped
    """

    def __init__(
        self,
        plan: PoolPlan,
        namespace: str,
        allocators: Mapping[str, PageAllocator],
        snapshots: Snapshots,
    ) -> None:
        tiers = [tier for tier in plan.tiers if tier.scope == "position"]
        self.plan = plan
        self.namespace = namespace
        self.tiers = tuple(tier.name for tier in tiers)
        self.windows = {i: t.window for i, t in enumerate(tiers) if t.window is not None}
        self.has_full = len(self.windows) < len(tiers)
        self.allocators = [allocators[name] for name in self.tiers]
        self.snapshots = snapshots
        self.version = 0
        self.evicted_pages = 0
        self.clock = 0
        self.reset()

    def reset(self) -> None:
        """Be empty, whatever the allocators say."""
        self.version += 1
        self.roots: dict[str, Root] = {}
        self.nodes: dict[bytes, Node] = {}
        self.unheld = 0
        self.leaves = Leaves()
        self.window_nodes: dict[int, dict[int, Node]] = {i: {} for i in self.windows}
        self.let_go = {i: LetGo() for i in self.windows}

    def clear(self) -> None:
        """Give up every page."""
        for tier, allocator in enumerate(self.allocators):
            pages = (node.pages[tier] for node in self.nodes.values())
            allocator.release([page for page in pages if page != NO_PAGE])
        self.snapshots.retain(())
        self.reset()

    def num_cached(self, tier: int) -> int:
        """Pages of a tier that the cache owns."""
        return len(self.window_nodes[tier] if tier in self.windows else self.nodes)

    def num_evictable(self, tier: int) -> int:
        """Pages of a tier that nobody but the cache needs."""
        return len(self.let_go[tier]) if tier in self.windows else self.unheld

    def num_free(self, tier: int) -> int:
        """Pages of a tier that can be had: free ones and those that can be evicted."""
        return self.allocators[tier].num_free + self.num_evictable(tier)

    def first_page(self, tier: int, position: int) -> int:
        """Index of the first page that a query at that position sees in a tier."""
        window = self.windows.get(tier)
        if window is None:
            return 0
        return first_visible(position, window) // self.plan.page_tokens

    def recent(self, parent: Node, tokens: bytes) -> Iterator[Node]:
        """The newest children that share the first token."""
        return islice(parent.beginning(tokens), RECENT)

    def tick(self) -> None:
        """Begin an event: what it uses was used later than everything before."""
        self.clock += 1

    def hold(self, nodes: Sequence[Node]) -> None:
        """One more holder of each node."""
        for node in nodes:
            if not node.holders:
                self.unheld -= 1
            node.holders += 1
            node.used = self.clock

    def leave(self, nodes: Sequence[Node]) -> None:
        """One holder less of each node; parents come before children."""
        for node in reversed(nodes):
            node.used = self.clock
            node.holders -= 1
            if not node.holders:
                self.unheld += 1
                self.settle(node)

    def pin(self, node: Node, tier: int) -> int:
        """One more owner of a node's page, a sequence that sees it; returns the page."""
        page = node.pages[tier]
        self.allocators[tier].retain([page])
        if tier in self.windows:
            self.let_go[tier].discard(page)
            node.wanted = True
        return page

    def release(self, tier: int, pages: Sequence[int], *, passed: bool = False) -> None:
        """One owner less of each page, a sequence; `passed` when its window moved on."""
        allocator = self.allocators[tier]
        allocator.release(pages)
        if tier not in self.windows:
            return
        for page in pages:
            node = self.window_nodes[tier].get(page)
            if node is not None and allocator.owners(page) == 1:
                self.let_go[tier].push(page, passed=passed and not node.wanted)

    def alloc(self, tier: int, count: int) -> list[int]:
        """That many pages; the cache gives up as many as are missing, oldest first."""
        allocator = self.allocators[tier]
        for _ in range(min(count - allocator.num_free, self.num_evictable(tier))):
            if tier in self.windows:
                self._forget(tier, self.let_go[tier].pop())
            else:
                node = self.leaves.pop()
                self.evicted_pages += sum(page != NO_PAGE for page in node.pages)
                self._drop(node)
        return allocator.alloc(count)

    def add(
        self, parent: Node | None, adapter: str, tokens: bytes, pages: list[int]
    ) -> Node | None:
        """The node of these tokens, held once more; made of `pages` when there was none.

        The first page of the same tokens stays. None: other tokens have that very key.
        """
        parent = parent or self._root(adapter)
        key = chain(parent.key, tokens)
        node = self.nodes.get(key)
        if node is None:
            node = self._make(key, parent, tokens, pages)
        elif node.parent is not parent or node.tokens != tokens:
            return None
        else:
            for tier in self.windows:
                if node.pages[tier] == NO_PAGE and pages[tier] != NO_PAGE:
                    self._own(node, tier, pages[tier])
                    node.wanted = True  # somebody had to compute it again
        self.hold([node])
        return node

    def add_part(
        self, parent: Node | None, adapter: str, tokens: bytes, pages: list[int]
    ) -> Node | None:
        """Keep a partly filled page, unless the cache has one with these tokens or more.

        Returns the node of these tokens, and None where there is none but of more.
        """
        parent = parent or self._root(adapter)
        for node in self.recent(parent, tokens):
            if node.tokens.startswith(tokens) and _covers(node.pages, pages):
                if not node.holders:
                    self.hold([node])
                    self.leave([node])
                return node if node.tokens == tokens else None
        key = chain(parent.key, tokens)
        if key in self.nodes:
            return None
        node = self._make(key, parent, tokens, pages)
        self.settle(node)
        return node

    def _root(self, adapter: str) -> Root:
        return self.roots.get(adapter) or Root(self.plan, self.namespace, adapter)

    def _make(self, key: bytes, parent: Node, tokens: bytes, pages: list[int]) -> Node:
        """A new node that owns those pages, in place of partly filled ones that it contains."""
        for other in list(self.recent(parent, tokens)):
            contained = len(other.tokens) < len(tokens) and tokens.startswith(other.tokens)
            if contained and not other.holders and _covers(pages, other.pages):
                self._drop(other)
        if isinstance(parent, Root):
            self.roots[parent.adapter] = parent
        node = Node(key, parent, tokens, [NO_PAGE] * len(pages))
        node.used = self.clock
        node.link()
        self.nodes[key] = node
        self.unheld += 1
        for tier, page in enumerate(pages):
            if page != NO_PAGE:
                self._own(node, tier, page)
        return node

    def _own(self, node: Node, tier: int, page: int) -> None:
        node.pages[tier] = page
        self.allocators[tier].retain([page])
        if tier in self.windows:
            self.window_nodes[tier][page] = node

    def _forget(self, tier: int, page: int) -> None:
        """Give up a window page; its node goes too when nothing keeps it."""
        node = self.window_nodes[tier].pop(page)
        node.pages[tier] = NO_PAGE
        self.allocators[tier].release([page])
        self.version += 1
        self.evicted_pages += 1
        if not node.holders:
            self.settle(node)

    def settle(self, node: Node) -> None:
        """Queue or drop a node that has no holders, if it has no children either."""
        if node.children:
            return
        if node.bare:
            self._drop(node)
        elif self.has_full:
            self.leaves.push(node, self.unheld)

    def _drop(self, node: Node) -> None:
        """Drop a leaf that nobody holds, then its parents as long as nothing keeps them."""
        self.version += 1
        while True:
            for tier, page in enumerate(node.pages):
                if page != NO_PAGE:
                    self.allocators[tier].release([page])
                    if tier in self.windows:
                        del self.window_nodes[tier][page]
                        self.let_go[tier].discard(page)
                    node.pages[tier] = NO_PAGE
            node.unlink()
            self.snapshots.drop(node)
            del self.nodes[node.key]
            self.unheld -= 1
            parent = node.parent
            assert parent is not None
            if isinstance(parent, Root):
                if not parent.children:
                    del self.roots[parent.adapter]
                return
            if parent.children or parent.holders:
                return
            if not parent.bare:
                self.settle(parent)
                return
            node = parent


def _covers(pages: Sequence[int], others: Sequence[int]) -> bool:
    """Whether there is a page wherever the others have one."""
    return all(p != NO_PAGE or o == NO_PAGE for p, o in zip(pages, others, strict=True))
