"""Every invariant of a space, looked at one by one."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvq_pools.errors import IntegrityError
from kvq_pools.nodes import TOKEN_BYTES, Node, chain, root_key
from kvq_pools.pages import NO_PAGE

if TYPE_CHECKING:
    from kvq_pools.space import CacheSpace
    from kvq_pools.tree import PrefixTree


def check_space(space: CacheSpace) -> None:
    """Raise `IntegrityError` unless every page is accounted for and every table is right."""
    for sequence in space._sequences:
        sequence._check()
    tree = space._tree
    held = {tier: allocator.num_pages for tier, allocator in space._allocators.items()}
    planned = {t.name: t.pages(space.num_pages) for t in space.plan.tiers if t.scope != "step"}
    if held != planned:
        raise IntegrityError(f"allocators have {held} pages, the plan gives {planned}")
    for tier, allocator in space._allocators.items():
        owners = [[p for p in s.tables[tier] if p != NO_PAGE] for s in space._sequences]
        if tier in tree.tiers:
            pages = [node.pages[tree.tiers.index(tier)] for node in tree.nodes.values()]
            owners.append([page for page in pages if page != NO_PAGE])
        allocator.check_integrity(owners)
    _check_nodes(tree)
    tree.snapshots.check({*tree.nodes.values()})
    _check_holders(space)
    _check_order(tree)


def _check_nodes(tree: PrefixTree) -> None:
    """Keys are those of the tokens, links go both ways, pages are where they may be."""
    full = [tier for tier in range(len(tree.tiers)) if tier not in tree.windows]
    page_bytes = tree.plan.page_tokens * TOKEN_BYTES
    grain = tree.plan.granularity * TOKEN_BYTES
    for adapter, root in tree.roots.items():
        if root.key != root_key(tree.plan, tree.namespace, adapter) or not root.children:
            raise IntegrityError(f"the root of adapter {adapter!r} has another key or no children")
    parents: set[Node] = {*tree.roots.values(), *tree.nodes.values()}
    for key, node in tree.nodes.items():
        parent = node.parent
        if parent not in parents or not node.key == key == chain(parent.key, node.tokens):
            raise IntegrityError(f"node {key.hex()} is not what its tokens and parent make")
        newest = parent.children.get(node.tokens[:TOKEN_BYTES])
        if node is not (newest if node.newer is None else node.newer.older):
            raise IntegrityError(f"node {key.hex()} is no child of its parent")
        size = len(node.tokens)
        if not 0 < size <= page_bytes or size % grain or (size < page_bytes and node.children):
            raise IntegrityError(f"node {key.hex()} has {size} bytes of tokens, or children yet")
        if len(node.pages) != len(tree.tiers) or any(node.pages[t] == NO_PAGE for t in full):
            raise IntegrityError(f"node {key.hex()} lacks a page that it must have: {node.pages}")
        if node.bare and not (node.children or node.holders):
            raise IntegrityError(f"nothing keeps node {key.hex()}, which has no page")
    children = sum(len(_children(node)) for node in parents)
    if children != len(tree.nodes):
        raise IntegrityError(f"{children} children, yet {len(tree.nodes)} nodes")
    for tier in tree.windows:
        pages = {n.pages[tier]: n for n in tree.nodes.values() if n.pages[tier] != NO_PAGE}
        if pages != tree.window_nodes[tier]:
            raise IntegrityError(f"tier {tree.tiers[tier]!r}: pages are not with their nodes")


def _children(node: Node) -> list[Node]:
    return [child for first in node.children for child in node.beginning(first)]


def _check_holders(space: CacheSpace) -> None:
    """Each node has as many holders as sequences lead through it."""
    tree = space._tree
    holders: Counter[Node] = Counter()
    for sequence in space._sequences:
        previous = None
        path, loose = sequence._path, sequence._loose
        for index, node in enumerate(path):
            whole = len(node.tokens) == space.plan.page_tokens * TOKEN_BYTES
            if tree.nodes.get(node.key) is not node or not whole:
                raise IntegrityError(f"a sequence holds {node.key.hex()}, no whole page of these")
            if node.parent is not (previous or tree.roots.get(sequence.adapter)):
                raise IntegrityError(f"a sequence holds {node.key.hex()} out of order")
            for tier, page in zip(tree.tiers, node.pages, strict=True):
                mine = sequence.tables[tier][index]
                if NO_PAGE not in (mine, page) and mine != page:
                    raise IntegrityError(f"tier {tier!r}: {mine} and {page} for the same tokens")
            previous = node
        holders.update(path)
        if loose is None:
            continue
        told = len(path) * space.plan.page_tokens + len(loose) // TOKEN_BYTES
        if told != sequence.num_computed or not space.prefix_cache:
            raise IntegrityError(
                f"the cache was told of {told} tokens, {sequence.num_computed} are computed"
            )
    wrong = [node for node in tree.nodes.values() if node.holders != holders[node]]
    if wrong:
        raise IntegrityError(f"node {wrong[0].key.hex()} counts {wrong[0].holders} holders wrongly")


def _check_order(tree: PrefixTree) -> None:
    """What can be evicted is queued for it, exactly that."""
    unheld = {node for node in tree.nodes.values() if not node.holders}
    if len(unheld) != tree.unheld:
        raise IntegrityError(f"{len(unheld)} nodes without holders, {tree.unheld} counted")
    for node in unheld:
        if any(child.holders or child.used > node.used for child in _children(node)):
            raise IntegrityError(f"a child of {node.key.hex()} is held or younger")
    if tree.has_full and tree.leaves.current() != {n for n in unheld if not n.children}:
        raise IntegrityError("the queue of leaves is not the leaves that nobody holds")
    for tier in tree.windows:
        owners = tree.allocators[tier].owners
        alone = sorted(page for page in tree.window_nodes[tier] if owners(page) == 1)
        if sorted(page for page, _ in tree.let_go[tier].in_order()) != alone:
            raise IntegrityError(f"tier {tree.tiers[tier]!r}: the pages let go are not {alone}")
