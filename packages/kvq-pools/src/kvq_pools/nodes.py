"""Pages of tokens, each named by a hash of everything that decides what its bytes are."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from hashlib import blake2b

from kvq_pools.errors import PageError
from kvq_pools.pages import NO_PAGE
from kvq_pools.plan import PoolPlan

TOKEN_BYTES = 4
_TOKEN = next(code for code in "IL" if array(code).itemsize == TOKEN_BYTES)


def token_bytes(tokens: Iterable[int]) -> bytes:
    """Token ids as uint32; `PageError` for what is none."""
    try:
        return array(_TOKEN, tokens if isinstance(tokens, list) else list(tokens)).tobytes()
    except (TypeError, OverflowError) as error:
        raise PageError(f"tokens must be ints of 0 … {2**32 - 1}: {error}") from None


def chain(parent: bytes, tokens: bytes) -> bytes:
    """Key of a page of tokens after everything that `parent` stands for."""
    return blake2b(parent + tokens, digest_size=16).digest()


def root_key(plan: PoolPlan, namespace: str, adapter: str) -> bytes:
    """Key of no tokens at all: of the bytes' layout, the model and the adapter.

    How many pages a tier has does not matter; everything else that a plan says does.
    """
    layout = [
        (tier.name, tier.slabs, tier.window, tier.scope, tier.slots(plan.page_tokens))
        for tier in plan.tiers
    ]
    said = repr((plan.page_tokens, layout, namespace, adapter))
    return blake2b(said.encode(), digest_size=16).digest()


class Node:
    """A page of tokens after those of its parents, and what the cache holds of it.

    Attributes
    ----------
    key : `chain` of the parent's key and `tokens`
    parent : None at a `Root`
    tokens : uint32 bytes; a node with fewer than a page of them has no children
    pages : one per position tier, -1 where the cache holds none
    children : a first token's bytes → the newest child that begins with it
    older, newer : the neighbours among its parent's children that begin with the same token
    holders : running sequences whose tokens lead through it
    used : when a sequence last began or ended here
    wanted : whether its window pages were asked for again
    """

    __slots__ = (
        "children",
        "holders",
        "key",
        "newer",
        "older",
        "pages",
        "parent",
        "tokens",
        "used",
        "wanted",
    )

    def __init__(self, key: bytes, parent: Node | None, tokens: bytes, pages: list[int]) -> None:
        self.key = key
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.children: dict[bytes, Node] = {}
        self.older: Node | None = None
        self.newer: Node | None = None
        self.holders = 0
        self.used = 0
        self.wanted = False

    @property
    def bare(self) -> bool:
        """Whether the cache holds no page of it."""
        return all(page == NO_PAGE for page in self.pages)

    def beginning(self, tokens: bytes) -> Iterator[Node]:
        """The children that begin with the first of these tokens, the newest first."""
        child = self.children.get(tokens[:TOKEN_BYTES])
        while child is not None:
            yield child
            child = child.older

    def link(self) -> None:
        """Become the newest child of the parent."""
        assert self.parent is not None
        first = self.tokens[:TOKEN_BYTES]
        self.older = self.parent.children.get(first)
        if self.older is not None:
            self.older.newer = self
        self.parent.children[first] = self

    def unlink(self) -> None:
        """Be no child any more."""
        assert self.parent is not None
        if self.newer is not None:
            self.newer.older = self.older
        elif self.older is not None:
            self.parent.children[self.tokens[:TOKEN_BYTES]] = self.older
        else:
            del self.parent.children[self.tokens[:TOKEN_BYTES]]
        if self.older is not None:
            self.older.newer = self.newer
        self.older = self.newer = None


class Root(Node):
    """No tokens, of an adapter: the parent of the first pages."""

    __slots__ = ("adapter",)

    def __init__(self, plan: PoolPlan, namespace: str, adapter: str) -> None:
        super().__init__(root_key(plan, namespace, adapter), None, b"", [])
        self.adapter = adapter
