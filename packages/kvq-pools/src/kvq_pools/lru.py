"""What the prefix cache gives up next."""

from __future__ import annotations

from collections import OrderedDict
from heapq import heapify, heappop, heappush
from itertools import count

from kvq_pools.nodes import Node


class Leaves:
    """Nodes without holders and children, least recently used first.

    A heap in which out-of-date entries stay until they come up: a node that was held, extended
    or dropped since is passed over, one that was used since has a newer entry.
    """

    __slots__ = ("_heap", "_order")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []
        self._order = count()

    def push(self, node: Node, most: int) -> None:
        """Add a node, in O(log n); `most`: how many leaves there can be."""
        if len(self._heap) > 64 + 2 * most:
            self._heap = [entry for entry in self._heap if self._current(entry)]
            heapify(self._heap)
        heappush(self._heap, (node.used, next(self._order), node))

    def pop(self) -> Node:
        """Take the node to drop next; IndexError when there is none."""
        while True:
            entry = heappop(self._heap)
            if self._current(entry):
                return entry[2]

    def current(self) -> set[Node]:
        """All nodes that `pop` would return."""
        return {entry[2] for entry in self._heap if self._current(entry)}

    def _current(self, entry: tuple[int, int, Node]) -> bool:
        used, _, node = entry
        return node.used == used and not node.holders and not node.children and not node.bare


class LetGo:
    """Window pages that only the cache holds, in the order in which it gives them up.

    Pages that were only passed come first: a long prefill moves a window over all its tokens
    once, which must not drive out the last pages of conversations or those wanted twice.
    """

    __slots__ = ("_kept", "_passed")

    def __init__(self) -> None:
        self._passed: OrderedDict[int, None] = OrderedDict()  # a dict pops its first in O(n)
        self._kept: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._passed) + len(self._kept)

    def __contains__(self, page: int) -> bool:
        return page in self._passed or page in self._kept

    def push(self, page: int, *, passed: bool) -> None:
        """Add a page as the newest of its kind."""
        (self._passed if passed else self._kept)[page] = None

    def discard(self, page: int) -> None:
        """Take a page out if it is there."""
        self._passed.pop(page, None)
        self._kept.pop(page, None)

    def pop(self) -> int:
        """Take the page to give up next; KeyError when there is none."""
        return (self._passed or self._kept).popitem(last=False)[0]

    def in_order(self) -> list[tuple[int, bool]]:
        """(page, passed) of all pages, the next to give up first."""
        return [*((p, True) for p in self._passed), *((p, False) for p in self._kept)]
