"""What a caller keeps beside pages of the prefix cache, in a bounded number of places.

Some models have more to remember of the tokens before a position than rows of a cache: a state
that every token rewrites. Whoever goes on from cached pages needs the state that was there, so a
copy of it is kept at the ends of some of the cache's nodes. What it is the caller alone knows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass

from kvq_pools.errors import IntegrityError, whole_number
from kvq_pools.nodes import Node


@dataclass(frozen=True, slots=True)
class SnapshotStats:
    """Counters of a space since it was made, and what there is now.

    Attributes
    ----------
    places, held : how many there may be, and are
    hits : sequences that began with one
    evicted : given up for others
    missed_tokens : that had pages and no snapshot, so that they were computed again
    """

    places: int = 0
    held: int = 0
    hits: int = 0
    evicted: int = 0
    missed_tokens: int = 0


@dataclass(slots=True, eq=False)
class _Snapshot:
    """One of them; `credit` is what the cheapest was worth when this was last made or used."""

    place: int
    num_tokens: int
    credit: int
    passed: bool


class Snapshots:
    """Which nodes have a snapshot, and in which place.

    The one given up is worth the least: as many tokens as would be computed again without it,
    counted from the snapshot before it on the way there, and what the last one given up was worth
    when it was last used. Of those that save as much it is the least recently used; a long
    conversation outlives many short ones, yet not for ever. Those that a long prompt only passed
    come first, and never take the place of another kind.
    """

    def __init__(self, places: int = 0) -> None:
        self.places = whole_number("snapshots", places)
        self.hits = self.evicted = self.missed_tokens = 0
        self._of: dict[Node, _Snapshot] = {}  # the least recently used first
        self._pins: Counter[int] = Counter()  # place → sequences that have yet to read it
        self._credit = 0

    def stats(self) -> SnapshotStats:
        """What happened so far."""
        return SnapshotStats(
            self.places, len(self._of), self.hits, self.evicted, self.missed_tokens
        )

    def __contains__(self, node: Node) -> bool:
        return node in self._of

    def keep(
        self, node: Node, num_tokens: int, save: Callable[[int], bool], *, passed: bool
    ) -> bool:
        """Have a snapshot of a node, which ends after `num_tokens`; False where there is none.

        `save` writes to a place, or returns False when it cannot: then nothing has changed.
        """
        if node in self._of:  # of the same tokens: it says the same
            self._use(node, passed)
            return True
        new = _Snapshot(-1, num_tokens, self._credit, passed)
        victim = None
        place = self._free_place()
        if place is None:
            victim = self._cheapest(node, new)
            if victim is None:
                return False
            place = self._of[victim].place
        if not save(place):
            return False
        if victim is not None:
            self._credit = max(self._credit, self._worth(victim, self._of[victim]))
            del self._of[victim]
            self.evicted += 1
        new.place = place
        self._of[node] = new
        return True

    def pin(self, node: Node) -> int:
        """A node's place, which stays as it is until it is unpinned."""
        self._use(node, passed=False)
        self.hits += 1
        place = self._of[node].place
        self._pins[place] += 1
        return place

    def unpin(self, place: int) -> None:
        """One reader less."""
        self._pins[place] -= 1
        if not self._pins[place]:
            del self._pins[place]

    def drop(self, node: Node) -> None:
        """Give up a node's, if it has one, for its pages are gone."""
        self._of.pop(node, None)

    def retain(self, nodes: Container[Node]) -> None:
        """Give up those of all other nodes."""
        self._of = {node: found for node, found in self._of.items() if node in nodes}

    def _use(self, node: Node, passed: bool) -> None:
        found = self._of[node] = self._of.pop(node)  # the last one now
        found.credit, found.passed = self._credit, found.passed and passed

    def _free_place(self) -> int | None:
        taken = {found.place for found in self._of.values()} | self._pins.keys()
        return next((place for place in range(self.places) if place not in taken), None)

    def _cheapest(self, node: Node, new: _Snapshot) -> Node | None:
        """Whose snapshot makes room for a new one; None when that is worth no more itself."""
        unread = {n: s for n, s in self._of.items() if s.place not in self._pins}
        passed = {n: s for n, s in unread.items() if s.passed}
        if not passed and new.passed:
            return None
        worths = {n: self._worth(n, s) for n, s in (passed or unread).items()}
        cheapest = min(worths, key=worths.__getitem__, default=None)  # of equal ones the first
        if cheapest is not None and new.passed and self._worth(node, new) < worths[cheapest]:
            return None
        return cheapest

    def _worth(self, node: Node, snapshot: _Snapshot) -> int:
        before, parent = 0, node.parent
        while parent is not None:
            if parent in self._of:
                before = self._of[parent].num_tokens
                break
            parent = parent.parent
        return snapshot.credit + snapshot.num_tokens - before

    def check(self, nodes: Container[Node]) -> None:
        """Raise `IntegrityError` unless each is of one of these nodes and has its own place."""
        places = [found.place for found in self._of.values()]
        if len({*places}) < len(places) or not all(0 <= p < self.places for p in places):
            raise IntegrityError(f"snapshots are in places {places} of {self.places}")
        gone = [node for node in self._of if node not in nodes]
        if gone:
            raise IntegrityError(f"node {gone[0].key.hex()} is gone and has a snapshot yet")
