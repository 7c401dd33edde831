"""What the prefix cache knows of some tokens. Asking changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvq_pools.nodes import TOKEN_BYTES, Node, chain, token_bytes
from kvq_pools.pages import NO_PAGE
from kvq_pools.tree import PrefixTree


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What the cache has of some tokens; good until it drops something.

    Attributes
    ----------
    num_tokens : positions [0, num_tokens) need not be computed
    matched : so many tokens have pages; fewer are a hit where those lack a snapshot
    nodes : whole pages, shared
    tail : a page of which only the first tokens are used, by copying it
    tree, version : which was asked, and its version then
    """

    num_tokens: int = 0
    matched: int = field(default=0, repr=False, kw_only=True)
    nodes: tuple[Node, ...] = field(default=(), repr=False)
    tail: Node | None = field(default=None, repr=False)
    tree: PrefixTree | None = field(default=None, repr=False)
    version: int = field(default=0, repr=False)


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """Counters of a space since it was made.

    Attributes
    ----------
    lookups : sequences opened with tokens
    queried_tokens, hit_tokens : theirs, and how many of them the cache had
    evicted_pages : pages that the cache gave up for others, all tiers together
    """

    lookups: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    evicted_pages: int = 0


def match(tree: PrefixTree, tokens: Sequence[int], adapter: str, *, partly: bool) -> PrefixHit:
    """The longest prefix of the tokens that can be used; one token is left to compute.

    `partly`: a page may be used in part, when there is room for a copy of it.
    """
    grain = tree.plan.granularity
    data = token_bytes(tokens)
    limit = max(0, len(tokens) - 1) // grain * grain
    hit = _with_pages(tree, data, adapter, limit, partly=partly)
    if not hit.matched or not tree.snapshots.places:
        return hit
    return _with_snapshot(tree, data, adapter, limit, hit, partly=partly)


def _with_pages(
    tree: PrefixTree, data: bytes, adapter: str, limit: int, *, partly: bool
) -> PrefixHit:
    """The longest prefix, of at most `limit` tokens, that has pages."""
    page_tokens, grain = tree.plan.page_tokens, tree.plan.granularity
    previous: Node | None = tree.roots.get(adapter)
    if previous is None or not limit:
        return PrefixHit(tree=tree, version=tree.version)
    step, nodes = page_tokens * TOKEN_BYTES, tree.nodes
    path: list[Node] = []
    for at in range(0, len(data) - step + 1, step):
        page = data[at : at + step]
        node = nodes.get(chain(previous.key, page))
        # an equal key alone would trust the hash; with these it cannot mislead
        if node is None or node.parent is not previous or node.tokens != page:
            break
        path.append(node)
        previous = node
    whole = min(len(path), limit // page_tokens)
    start = whole * page_tokens
    if partly and limit > start:
        exact = (path[whole], page_tokens) if whole < len(path) else None
        rest = data[whole * step : whole * step + step]
        tail, common = exact or _closest(tree, previous, rest)
        end = min(limit, start + common // grain * grain)
        if tail is not None and end > start and _reach(tree, [*path[:whole], tail], end) == end:
            hit = PrefixHit(end, tuple(path[:whole]), tail, tree, tree.version, matched=end)
            if _has_room(tree, hit):
                return hit
    end = _reach(tree, path, start)
    seen = tuple(path[: end // page_tokens])
    return PrefixHit(end, seen, None, tree, tree.version, matched=end)


def _with_snapshot(
    tree: PrefixTree, data: bytes, adapter: str, limit: int, hit: PrefixHit, *, partly: bool
) -> PrefixHit:
    """The longest part of a hit that ends where there is a snapshot."""
    found = PrefixHit(tree=tree, version=tree.version, matched=hit.matched)
    page_tokens, nodes = tree.plan.page_tokens, hit.nodes
    start = len(nodes) * page_tokens
    rest = data[start * TOKEN_BYTES : limit * TOKEN_BYTES]
    if partly and rest:
        parent = nodes[-1] if nodes else tree.roots[adapter]
        ends = {
            start + len(node.tokens) // TOKEN_BYTES: node
            for node in tree.recent(parent, rest)
            if node in tree.snapshots and rest.startswith(node.tokens)
        }
        for end in sorted(ends, reverse=True):
            tail = replace(found, num_tokens=end, nodes=nodes, tail=ends[end])
            if _reach(tree, [*nodes, ends[end]], end) == end and _has_room(tree, tail):
                return tail
    for count in range(len(nodes), 0, -1):
        end = count * page_tokens
        if nodes[count - 1] in tree.snapshots and _reach(tree, nodes, end) == end:
            return replace(found, num_tokens=end, nodes=nodes[:count])
    return found


def claimed(tree: PrefixTree, hit: PrefixHit, *, tail: bool = False) -> list[int]:
    """Pages of each tier that stop being evictable when the hit is taken, `tail` included."""
    nodes = [*hit.nodes, hit.tail] if tail and hit.tail else list(hit.nodes)
    unheld = 0
    for node in reversed(nodes):
        if node.holders:  # and so have its parents
            break
        unheld += 1
    counts = []
    for tier, allocator in enumerate(tree.allocators):
        if tier in tree.windows:
            seen = nodes[tree.first_page(tier, hit.num_tokens) :]
            counts.append(sum(allocator.owners(node.pages[tier]) == 1 for node in seen))
        else:
            counts.append(unheld)
    return counts


def _has_room(tree: PrefixTree, hit: PrefixHit) -> bool:
    """Whether the hit's tail can be copied while all its pages are held."""
    return all(tree.num_free(t) > held for t, held in enumerate(claimed(tree, hit, tail=True)))


def _closest(tree: PrefixTree, parent: Node, tokens: bytes) -> tuple[Node | None, int]:
    """The child that begins most like `tokens`, and how many tokens they share."""
    best, most = None, 0
    for node in tree.recent(parent, tokens):
        pairs = enumerate(zip(node.tokens, tokens, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), min(len(node.tokens), len(tokens)))
        if same // TOKEN_BYTES > most:
            best, most = node, same // TOKEN_BYTES
    return best, most


def _reach(tree: PrefixTree, path: Sequence[Node], end: int) -> int:
    """`end`, or the last end of a page before it where every window finds its pages."""
    page_tokens = tree.plan.page_tokens
    while end:
        gaps = (
            index
            for tier in tree.windows
            for index in range((end - 1) // page_tokens, tree.first_page(tier, end) - 1, -1)
            if path[index].pages[tier] == NO_PAGE
        )
        gap = next(gaps, None)
        if gap is None:
            break
        end = gap * page_tokens
    return end
