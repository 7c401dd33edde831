"""What can go wrong with plans and pages, and the one check of whole numbers."""

from __future__ import annotations


class PlanError(ValueError):
    """A plan that cannot be: names, layers, heads or pages that do not go together."""


class PageError(ValueError):
    """Pages, positions or sequences used against the rules; nothing was changed."""


class OutOfPages(RuntimeError):
    """Fewer pages are free than were asked for; nothing was handed out.

    Attributes
    ----------
    needed, free : pages
    """

    def __init__(self, needed: int, free: int, total: int, where: str = "") -> None:
        self.needed = needed
        self.free = free
        super().__init__(
            f"{needed} pages needed{where}, {free} of {total} free; "
            "wait until others release theirs, or plan a larger pool"
        )


class BudgetError(ValueError):
    """Memory that is too small for what was asked; nothing was allocated."""


class RebuildRejected(ValueError):
    """A rebuild that cannot be done; the pool was not touched and is in use."""


class RebuildFailed(RuntimeError):
    """A rebuild that failed on its way; the pool has its old size and its live pages again."""


class PoolFailed(RuntimeError):
    """A pool without memory: a rebuild failed and so did the way back. Make a new pool."""


class IntegrityError(RuntimeError):
    """An invariant of the page accounting is broken: a defect, not a condition to handle."""


def whole_number(
    what: str, value: object, least: int = 0, error: type[ValueError] = PageError
) -> int:
    """`value` if it is an int of at least `least`; `error` naming it otherwise.

    NumPy integers are refused: an int32 would overflow where ints cannot.
    """
    if type(value) is not int or value < least:
        raise error(f"{what} must be an int of at least {least}, got {value!r}")
    return value
