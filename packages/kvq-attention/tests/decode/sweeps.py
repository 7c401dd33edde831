"""Cases of a sweep over what decode takes: every pair of values of two axes occurs."""

from __future__ import annotations

from typing import Any

from ..cuda import emulated
from .cases import DTYPES, PAGE_TOKENS, SCORINGS, pairwise
from .places import EMULATED, INTERPRETED, Place

Case = dict[str, Any]

QUERIES = (1, 2, 3, 4, 5, 6, 7, 8, (2, 0, 1))
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 20)
# Query tokens × heads of a group in a case: each row costs Triton's interpreter milliseconds.
MOST_ROWS = 24


def fits(place: Place, case: Case) -> bool:
    """Whether the values of a case, or of a part of one, go together."""
    codec = case.get("codec")
    if codec is not None and case.get("dim", place.dims_of(codec)[0]) not in place.dims_of(codec):
        return False
    if codec is not None and case.get("dtype", place.dtype(codec)) not in place.dtypes(codec):
        return False
    if "group" not in case or "queries" not in case:
        return True
    return case["group"] * sum(counts(case["queries"])) <= MOST_ROWS


def counts(queries: int | tuple[int, ...]) -> tuple[int, ...]:
    """Query tokens of each request of a case."""
    return (queries,) if isinstance(queries, int) else queries


def sweep(place: Place) -> list[Case]:
    """Few cases: every pair of values of two axes."""
    compiled = {"codec": place.codecs, "dim": place.dims, "dtype": DTYPES}
    called = {
        "group": GROUPS,
        "queries": QUERIES,
        "scoring": SCORINGS,
        "page_tokens": PAGE_TOKENS,
    }
    if place != EMULATED:
        return list(pairwise({**compiled, **called}, lambda case: fits(place, case)))
    # Each way in which kernels are compiled costs seconds: pairs of these first, and no others.
    asked = [
        {"group": group, "queries": queries, "rows": rows_at_once(group, queries)}
        for group in GROUPS
        for queries in QUERIES
        if fits(place, {"group": group, "queries": queries})
    ]
    more = {"rows": sorted({one["rows"] for one in asked}), "capped": (False, True)}
    ways = list(pairwise({**compiled, **more}, lambda case: fits(place, case)))

    def known(case: Case) -> bool:
        rows = {one["rows"] for one in asked if agree(case, one)}
        return any(
            way["rows"] in rows
            and agree(case, way)
            and way["capped"] == capped(case.get("scoring"), way["capped"])
            for way in ways
        )

    return list(pairwise({**compiled, **called}, known))


def agree(case: Case, other: Case) -> bool:
    """Whether two have the same values where both have one."""
    return all(other.get(name, value) == value for name, value in case.items())


def rows_at_once(group: int, queries: int | tuple[int, ...]) -> int:
    """Query rows that a block of the CUDA kernels takes at once."""
    asked = counts(queries)
    return emulated.rows_at_once(group * -(-sum(asked) // len(asked)))


def capped(scoring: str | None, unknown: bool) -> bool:
    """Whether a scoring has a soft cap."""
    return unknown if scoring is None else scoring in ("softcap", "all")


SWEEPS = {place: sweep(place) for place in (INTERPRETED, EMULATED)}
