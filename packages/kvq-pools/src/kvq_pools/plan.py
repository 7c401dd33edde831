"""What is stored and what it costs: slabs make tiers, tiers make a plan.

Every byte count in this package comes from `Slab.page_bytes`, which asks the codec's spec.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from kvq_codecs import Plane, Spec
from kvq_pools.errors import PlanError, whole_number

Scope = Literal["position", "request", "step"]


@dataclass(frozen=True, slots=True)
class Slab:
    """One thing stored per slot: keys, say, of some layers.

    Attributes
    ----------
    name : what is stored: k, v, …
    spec : byte layout of a row
    layers : global layer ids, in buffer order; the model's other layers store nothing here
    heads : rows per slot
    dim : values per row
    slots_per_row : neighbouring slots that share one row
    """

    name: str
    spec: Spec
    layers: tuple[int, ...]
    heads: int
    dim: int
    slots_per_row: int = 1

    def __post_init__(self) -> None:
        _check_name("a slab", self.name)
        layers = _sequence(f"slab {self.name!r}: layers", self.layers, int)
        object.__setattr__(self, "layers", layers)
        if not self.layers:
            raise PlanError(f"slab {self.name!r} stores no layer; leave it out or name its layers")
        for layer in self.layers:
            whole_number(f"slab {self.name!r}: a layer id", layer, 0, PlanError)
        if len(set(self.layers)) < len(self.layers):
            raise PlanError(f"slab {self.name!r} names a layer twice: {list(self.layers)}")
        whole_number(f"slab {self.name!r}: heads", self.heads, 1, PlanError)
        whole_number(f"slab {self.name!r}: slots_per_row", self.slots_per_row, 1, PlanError)
        if not isinstance(self.spec, Spec):
            raise PlanError(
                f"slab {self.name!r}: the layout must be a kvq_codecs.Spec, got {self.spec!r}; "
                "kvq_codecs.get(name).spec is a codec's"
            )
        self.spec.check(whole_number(f"slab {self.name!r}: dim", self.dim, 1, PlanError))

    def dense(self, layer: int) -> int:
        """Index of a global layer id along the buffers' first axis; KeyError if unmapped."""
        try:
            return self.layers.index(layer)
        except ValueError:
            raise KeyError(
                f"slab {self.name!r} does not store layer {layer}; it stores {list(self.layers)}"
            ) from None

    def shape(self, plane: Plane, pages: int, page_slots: int) -> tuple[int, int, int, int, int]:
        """Buffer of one plane: [layers, pages, heads, rows of a page, items]."""
        rows = page_slots // self.slots_per_row
        return len(self.layers), pages, self.heads, rows, plane.row_items(self.dim)

    def page_bytes(self, page_slots: int) -> int:
        """Bytes of one page of that many slots over all layers of the slab."""
        rows = page_slots // self.slots_per_row
        return self.spec.row_bytes(self.dim) * self.heads * len(self.layers) * rows


@dataclass(frozen=True, slots=True)
class Tier:
    """Slabs in one slot space: one page table and one allocator serve them all.

    Attributes
    ----------
    name : full, window, …
    slabs : what is stored per slot
    window : positions a query sees, its own included; None = all
    fixed_pages : usable pages whatever the pool's size; None = the tier grows with the pool
    scope : what a slot belongs to.
        "position": a position of a sequence, through the sequence's page table.
        "request": a running request, which has one page, the ring of its last tokens;
        fixed_pages is the most requests that run at once.
        "step": a token of the step being computed; nobody owns a page, there is no table.
    page_slots : slots of a page; None = the plan's page_tokens, as position tiers must have it
    """

    name: str
    slabs: tuple[Slab, ...]
    window: int | None = None
    fixed_pages: int | None = None
    scope: Scope = "position"
    page_slots: int | None = None

    def __post_init__(self) -> None:
        _check_name("a tier", self.name)
        slabs = _sequence(f"tier {self.name!r}: slabs", self.slabs, Slab)
        object.__setattr__(self, "slabs", slabs)
        if not self.slabs:
            raise PlanError(f"tier {self.name!r} needs at least one slab")
        if self.window is not None:
            whole_number(f"tier {self.name!r}: window", self.window, 1, PlanError)
        if self.fixed_pages is not None:
            whole_number(f"tier {self.name!r}: fixed_pages", self.fixed_pages, 1, PlanError)
        if self.page_slots is not None:
            whole_number(f"tier {self.name!r}: page_slots", self.page_slots, 1, PlanError)
        if self.scope not in get_args(Scope):
            raise PlanError(
                f"tier {self.name!r}: scope must be one of {', '.join(get_args(Scope))}, "
                f"got {self.scope!r}"
            )
        if self.scope == "position":
            if self.page_slots is not None:
                raise PlanError(
                    f"tier {self.name!r}: page_slots is {self.page_slots}, yet pages of positions "
                    "have the plan's page_tokens slots; leave it None"
                )
        elif self.fixed_pages is None or self.window is not None:
            raise PlanError(
                f"tier {self.name!r} of scope {self.scope!r} needs fixed_pages and has no window, "
                f"got {self.fixed_pages} and {self.window}"
            )

    def slots(self, page_tokens: int) -> int:
        """Slots of one page in a plan of pages of `page_tokens`."""
        return page_tokens if self.page_slots is None else self.page_slots

    def pages(self, num_pages: int) -> int:
        """Usable pages in a pool of `num_pages`; the padding page is not among them."""
        return num_pages if self.fixed_pages is None else self.fixed_pages

    def page_bytes(self, page_tokens: int) -> int:
        """Bytes of one page of every slab, in a plan of pages of `page_tokens`."""
        return sum(slab.page_bytes(self.slots(page_tokens)) for slab in self.slabs)


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The price list of a pool, affine in its pages.

    A tier has one page more than is usable: the padding page, which padded rows of a batch may
    write to. It is in every price below.

    Attributes
    ----------
    page_tokens : tokens of a page, in every tier of positions
    tiers : at least one of which grows
    """

    page_tokens: int
    tiers: tuple[Tier, ...]

    def __post_init__(self) -> None:
        whole_number("page_tokens", self.page_tokens, 1, PlanError)
        object.__setattr__(self, "tiers", _sequence("tiers", self.tiers, Tier))
        names = [tier.name for tier in self.tiers]
        if len(set(names)) < len(names):
            raise PlanError(f"tiers need different names, got {names}")
        if all(tier.fixed_pages is not None for tier in self.tiers):
            raise PlanError(
                f"no tier of {names} grows with the pool; leave fixed_pages None in one"
            )
        homes: dict[tuple[str, int], str] = {}
        for tier in self.tiers:
            for slab in tier.slabs:
                page_slots = tier.slots(self.page_tokens)
                if page_slots % slab.slots_per_row:
                    kind = "page_tokens" if tier.page_slots is None else "page_slots"
                    raise PlanError(
                        f"{kind} {page_slots} is not a multiple of the {slab.slots_per_row} slots "
                        f"that share a row of slab {slab.name!r}; make it one"
                    )
                for layer in slab.layers:
                    home = homes.get((slab.name, layer))
                    if home is not None:
                        raise PlanError(
                            f"{slab.name!r} of layer {layer} is stored twice, in tier {home!r} "
                            f"and in tier {tier.name!r}; give the layer to one slab"
                        )
                    homes[slab.name, layer] = tier.name

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in every tier that grows."""
        return sum(t.page_bytes(self.page_tokens) for t in self.tiers if t.fixed_pages is None)

    @property
    def fixed_bytes(self) -> int:
        """Bytes that do not depend on the pool's size: padding pages and fixed tiers."""
        return sum(self.tier_bytes(tier.name, 0) for tier in self.tiers)

    @property
    def token_bytes(self) -> float:
        """Bytes of one more token in every tier that grows."""
        return self.page_bytes / self.page_tokens

    @property
    def token_bytes_by_tier(self) -> dict[str, float]:
        """Bytes of one token in each tier of positions, growing or fixed."""
        return {
            tier.name: tier.page_bytes(self.page_tokens) / self.page_tokens
            for tier in self.tiers
            if tier.scope == "position"
        }

    @property
    def granularity(self) -> int:
        """Tokens that a shared prefix must be a multiple of, so that no row is shared in part."""
        positions = [tier for tier in self.tiers if tier.scope == "position"]
        return math.lcm(*(slab.slots_per_row for tier in positions for slab in tier.slabs))

    def tier_bytes(self, name: str, pages: int) -> int:
        """Bytes of one tier in a pool of that many pages, its padding page included."""
        tier = self.tier(name)
        return (tier.pages(whole_number("pages", pages)) + 1) * tier.page_bytes(self.page_tokens)

    def nbytes(self, pages: int) -> int:
        """Bytes of a pool of that many pages, everything included."""
        return self.fixed_bytes + whole_number("pages", pages) * self.page_bytes

    def pages_for(self, budget_bytes: int) -> int:
        """Most pages whose pool fits the budget; 0 when not even one does."""
        left = whole_number("budget_bytes", budget_bytes) - self.fixed_bytes
        return max(0, left // self.page_bytes)

    def tier(self, name: str) -> Tier:
        """The tier of that name; KeyError if there is none."""
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise KeyError(f"no tier {name!r}; the plan has {[t.name for t in self.tiers]}")

    def tier_of(self, layer: int) -> Tier:
        """The first tier that stores a layer; KeyError if none does."""
        for tier in self.tiers:
            if any(layer in slab.layers for slab in tier.slabs):
                return tier
        stored = sorted({n for t in self.tiers for slab in t.slabs for n in slab.layers})
        raise KeyError(f"layer {layer} has no paged cache; layers {stored} do")

    def slab(self, name: str, layer: int) -> Slab:
        """The slab of that name that stores a layer; KeyError if none does."""
        named = [slab for t in self.tiers for slab in t.slabs if slab.name == name]
        for slab in named:
            if layer in slab.layers:
                return slab
        if not named:
            known = sorted({slab.name for t in self.tiers for slab in t.slabs})
            raise KeyError(f"no slab {name!r}; the plan has {known}")
        stored = sorted(n for slab in named for n in slab.layers)
        raise KeyError(f"no slab {name!r} stores layer {layer}; layers {stored} are stored")


def _check_name(what: str, name: object) -> None:
    if type(name) is not str or not name:
        raise PlanError(f"{what} needs a name, a str that is not empty, got {name!r}")


def _sequence(what: str, given: object, kind: type) -> tuple[Any, ...]:
    """A sequence as a tuple: equal plans are then equal in every way, and can be hashed."""
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise PlanError(f"{what} must be a tuple of {kind.__name__}, got {given!r}")
    for item in given:
        if not isinstance(item, kind):
            raise PlanError(f"{what} must be a tuple of {kind.__name__}, got {item!r} in it")
    return tuple(given)
