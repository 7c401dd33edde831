"""The pages of one running sequence, in all tiers at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvq_pools.errors import IntegrityError, PageError, whole_number
from kvq_pools.nodes import TOKEN_BYTES, Node, token_bytes
from kvq_pools.pages import NO_PAGE, pages_for_tokens, slots
from kvq_pools.prefix import PrefixHit

if TYPE_CHECKING:
    from kvq_pools.space import CacheSpace

CopyPage = Callable[[str, int, int], None]  # tier, from page, to page
Save = Callable[["SequencePages", int], bool]  # of what was computed, place


class SequencePages:
    """One sequence's pages in every tier; `CacheSpace.open` makes them.

    Attributes
    ----------
    tables : tier → pages. Of a tier of positions: index = position // page_tokens, -1 =
        released; of a tier of requests: its one page. Read, never write.
    adapter : what the sequence is computed with beside the model
    num_cached : tokens that the prefix cache had when it was opened
    num_tokens : positions [0, num_tokens) have pages, or had them
    num_computed : positions [0, num_computed) were computed; queries come from there on
    snapshot : place of what belongs to the tokens that were cached, until it is advanced; None
        where nothing does

    A step grows the sequence, computes, and advances it:

        0 ···· released | visible ···· num_computed ···· num_tokens
    """

    __slots__ = (
        "_kept_from",
        "_loose",
        "_path",
        "_space",
        "adapter",
        "num_cached",
        "num_computed",
        "num_tokens",
        "snapshot",
        "tables",
    )

    def __init__(self, space: CacheSpace, adapter: str = "") -> None:
        self._space = space
        self.adapter = adapter
        self._kept_from = {name: 0 for name in space._tree.tiers}  # index into the table
        self._path: list[Node] = []  # of its first pages
        # The computed tokens after the path's; None = it adds nothing to the cache (any more).
        self._loose: bytes | None = b"" if space.prefix_cache else None
        self.tables: dict[str, list[int]] = {name: [] for name in space._allocators}
        self.num_cached = 0
        self.num_tokens = 0
        self.num_computed = 0
        self.snapshot: int | None = None

    def grow(self, num_tokens: int) -> None:
        """Have pages for positions [0, num_tokens), in all tiers or, on `OutOfPages`, in none.

        Nothing happens when they are there already.
        """
        self._check_open()
        space = self._space
        wanted = self._missing(num_tokens)
        for tier, missing in wanted.items():
            if missing > space.num_free(tier):
                goal = f"to grow from {self.num_tokens} to {num_tokens} tokens"
                raise space._out_of_pages(missing, tier, goal)
        for tier, missing in wanted.items():
            if missing:
                self.tables[tier] += space._alloc(tier, missing)
        self.num_tokens = max(self.num_tokens, num_tokens)

    def advance(self, num_computed: int, tokens: Sequence[int] | None = None) -> None:
        """Note that positions [0, num_computed) were computed.

        `tokens`: the sequence's tokens so far, at least that many and the same as ever before;
        with them whole pages become part of the prefix cache at once, and where it has the same
        tokens already, computed at the same time, the tables take its pages. Without them, once,
        the sequence adds nothing more. Pages of window tiers that no query at num_computed or
        later can see are released.
        """
        self._check_open()
        whole_number("num_computed", num_computed)
        if not self.num_computed <= num_computed <= self.num_tokens:
            raise PageError(
                f"num_computed must be {self.num_computed} … {self.num_tokens} (what was computed "
                f"before … what has pages), got {num_computed}; to go back, close and open anew"
            )
        if tokens is not None and len(tokens) < num_computed:
            raise PageError(f"{len(tokens)} tokens given, {num_computed} were computed")
        if self._loose is not None and num_computed > self.num_computed:
            if tokens is None:
                self._loose = None
            else:
                self._register(self._loose + token_bytes(tokens[self.num_computed : num_computed]))
        if num_computed > self.num_computed:
            self._unpin()
        self.num_computed = num_computed
        tree = self._space._tree
        for number in tree.windows:
            name = tree.tiers[number]
            kept_from = tree.first_page(number, num_computed)
            table, done = self.tables[name], self._kept_from[name]
            if kept_from > done:
                tree.release(number, table[done:kept_from], passed=True)
                table[done:kept_from] = [NO_PAGE] * (kept_from - done)
                self._kept_from[name] = kept_from

    def keep(self, *, passed: bool = False) -> bool:
        """Have a snapshot at num_computed, the end of a whole page; whether there is one.

        Whoever has the same tokens can go on from there. `passed`: nothing says that somebody
        will, so that it takes nobody's place. The space must know the tokens.
        """
        self._check_open()
        return self._loose == b"" and self._keep(self._path[-1] if self._path else None, passed)

    def _keep(self, node: Node | None, passed: bool = False) -> bool:
        """A snapshot of the last node, the path's or the part of a page after it."""
        space, snapshots = self._space, self._space._tree.snapshots
        told = len(self._path) * space.plan.page_tokens + len(self._loose or b"") // TOKEN_BYTES
        if node is None or space.save is None or told != self.num_computed:
            return False
        save = partial(space.save, self)
        return snapshots.keep(node, self.num_computed, save, passed=passed)

    def _unpin(self) -> None:
        if self.snapshot is not None:
            self._space._tree.snapshots.unpin(self.snapshot)
            self.snapshot = None

    def slots(self, tier: str, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Slots int64 [stop - start] of positions [start, stop); `PageError` if one has no page."""
        table = self.tables[tier]
        if tier not in self._kept_from:
            raise PageError(
                f"tier {tier!r} does not map positions; the sequence's page is tables[{tier!r}][0]"
            )
        return slots(table, start, stop, self._space.plan.page_tokens)

    def fork(self) -> SequencePages:
        """A new sequence that has computed what this one has.

        They share whole pages; a page filled in part and the pages of request tiers are copied.
        Raises `OutOfPages`, and `PageError` when something is to be copied and the space has no
        `copy_page`; then nothing was changed.
        """
        self._check_open()
        space, tree = self._space, self._space._tree
        whole, rest = divmod(self.num_computed, space.plan.page_tokens)
        copies = {
            tier: table[whole : whole + 1] if tier in self._kept_from else table
            for tier, table in self.tables.items()
            if (rest if tier in self._kept_from else table)
        }
        if copies and space.copy_page is None:
            raise PageError(
                f"{self.num_computed} computed tokens leave pages to copy; make the space with "
                "copy_page=pool.copy_page"
            )
        for tier, pages in copies.items():
            if len(pages) > space.num_free(tier):
                raise space._out_of_pages(1, tier, "to fork")
        twin = SequencePages(space, self.adapter)
        twin.num_cached = self.num_cached
        twin.num_tokens = twin.num_computed = self.num_computed
        space._sequences[twin] = None
        twin._path = list(self._path)
        twin._kept_from = dict(self._kept_from)
        tree.tick()
        tree.hold(twin._path)
        for number, tier in enumerate(tree.tiers):
            twin.tables[tier] = self.tables[tier][:whole]
            tree.allocators[number].retain(twin._held(tier))
        if copies:
            twin._copy(copies)
        twin._loose = self._loose
        return twin

    def close(self) -> None:
        """Release every page; harmless when closed already.

        The prefix cache keeps what it was told the tokens of, the last page's part included, and
        a snapshot where that ends.
        """
        space, tree = self._space, self._space._tree
        if self not in space._sequences:
            return
        tree.tick()
        grain = space.plan.granularity * TOKEN_BYTES
        if self._loose is not None and len(self._loose) >= grain:
            part = self._loose[: len(self._loose) // grain * grain]
            pages = [self.tables[tier][len(self._path)] for tier in tree.tiers]
            node = tree.add_part(self._path[-1] if self._path else None, self.adapter, part, pages)
            if len(part) == len(self._loose):
                self._keep(node)
        elif self._loose == b"":
            self._keep(self._path[-1] if self._path else None)
        tree.leave(self._path)
        for number, tier in enumerate(tree.tiers):
            tree.release(number, self._held(tier))
        for tier in self.tables.keys() - self._kept_from:
            space._allocators[tier].release(self.tables[tier])
        self._end()

    def _end(self) -> None:
        """Be closed, without pages; whose they are now is the caller's affair."""
        del self._space._sequences[self]
        self._unpin()
        self._path, self._loose = [], None
        for table in self.tables.values():
            table.clear()

    def _start(self, hit: PrefixHit, data: bytes) -> None:
        """Begin with a hit's pages; `data` are the tokens after its whole pages."""
        tree = self._space._tree
        self.num_cached = self.num_tokens = self.num_computed = hit.num_tokens
        self._path = list(hit.nodes)
        tree.hold(hit.nodes)
        if tree.snapshots.places:
            self.snapshot = tree.snapshots.pin(hit.tail or hit.nodes[-1])
        for number, tier in enumerate(tree.tiers):
            first = tree.first_page(number, hit.num_tokens)
            pages = [tree.pin(node, number) for node in hit.nodes[first:]]
            self.tables[tier] = [NO_PAGE] * (len(hit.nodes) - len(pages)) + pages
            self._kept_from[tier] = first
        if hit.tail is not None:
            pins = {name: [tree.pin(hit.tail, n)] for n, name in enumerate(tree.tiers)}
            tree.hold([hit.tail])
            try:
                self._copy(pins)
            finally:
                for number, pages in enumerate(pins.values()):
                    tree.release(number, pages)
                tree.leave([hit.tail])
        self._loose = data

    def _copy(self, pages: Mapping[str, Sequence[int]]) -> None:
        """Append copies of pages to the tables; closes the sequence when copying fails."""
        space = self._space
        assert space.copy_page is not None
        try:
            for tier, sources in pages.items():
                for source in sources:
                    [target] = space._alloc(tier, 1)
                    self.tables[tier].append(target)
                    space.copy_page(tier, source, target)
        except BaseException:
            self.close()
            raise

    def _register(self, data: bytes) -> None:
        """Make whole pages nodes of the prefix cache; `data` are the tokens after the path's."""
        tree = self._space._tree
        tables = [self.tables[tier] for tier in tree.tiers]
        step = self._space.plan.page_tokens * TOKEN_BYTES
        tree.tick()
        done = 0
        while len(data) - done >= step:
            index = len(self._path)
            parent = self._path[-1] if self._path else None
            page = data[done : done + step]
            node = tree.add(parent, self.adapter, page, [table[index] for table in tables])
            if node is None:
                self._loose = None
                return
            self._path.append(node)
            done += step
            for number, table in enumerate(tables):
                mine, theirs = table[index], node.pages[number]
                if mine not in (theirs, NO_PAGE) and theirs != NO_PAGE:
                    table[index] = tree.pin(node, number)
                    tree.release(number, [mine])
        self._loose = data[done:]

    def _missing(self, num_tokens: int) -> dict[str, int]:
        """Pages to add in each tier to reach `num_tokens`."""
        pages = pages_for_tokens(num_tokens, self._space.plan.page_tokens)
        return {
            tier: max(0, (pages if tier in self._kept_from else min(pages, 1)) - len(table))
            for tier, table in self.tables.items()
        }

    def _held(self, tier: str) -> list[int]:
        """The pages it owns of a tier."""
        return self.tables[tier][self._kept_from.get(tier, 0) :]

    def _check_open(self) -> None:
        self._space._check_usable()
        if self not in self._space._sequences:
            raise PageError("the sequence is closed; open a new one")

    def _check(self) -> None:
        """Raise `IntegrityError` unless tables and counts agree; the allocators know the rest."""
        counts = self.num_cached, self.num_computed, self.num_tokens
        if any(type(n) is not int for n in counts) or not 0 <= counts[0] <= counts[1] <= counts[2]:
            raise IntegrityError(
                f"{self.num_cached!r} tokens cached, {self.num_computed!r} computed, of "
                f"{self.num_tokens!r}"
            )
        space, tree = self._space, self._space._tree
        if self.tables.keys() != space._allocators.keys() or {*self._kept_from} != {*tree.tiers}:
            raise IntegrityError(
                f"tables of tiers {list(self.tables)}, kept from of {list(self._kept_from)}; "
                f"the plan has {list(space._allocators)}, of positions {list(tree.tiers)}"
            )
        strange = [p for table in self.tables.values() for p in table if type(p) is not int]
        if strange:
            raise IntegrityError(f"tables hold what is no page: {strange[:8]}")
        pages = pages_for_tokens(self.num_tokens, space.plan.page_tokens)
        for number, tier in enumerate(tree.tiers):
            table, noted = self.tables[tier], self._kept_from[tier]
            kept_from = tree.first_page(number, self.num_computed)
            released = [i for i, page in enumerate(table) if page == NO_PAGE]
            if len(table) != pages or noted != kept_from or released != list(range(kept_from)):
                raise IntegrityError(
                    f"tier {tier!r}: table of {len(table)} pages, {released[:8]} released, "
                    f"kept from {noted!r}; "
                    f"{self.num_tokens} tokens of which {self.num_computed} were computed take "
                    f"{pages}, the first {kept_from} released"
                )
        for tier in self.tables.keys() - self._kept_from:
            least = int(self.num_tokens > self.num_cached)
            if not least <= len(self.tables[tier]) <= 1 or NO_PAGE in self.tables[tier]:
                raise IntegrityError(
                    f"tier {tier!r} of requests: {self.tables[tier]}, yet {self.num_tokens} tokens"
                )
