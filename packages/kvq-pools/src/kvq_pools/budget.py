"""How many pages the memory of a device allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvq_pools.errors import BudgetError, whole_number
from kvq_pools.plan import PoolPlan

FEWEST_PAGES = 2


@dataclass(frozen=True, slots=True)
class Budget:
    """What a pool may take of a device's memory, all in bytes.

    Attributes
    ----------
    free_before_bytes, free_after_bytes : free memory before and after the weights were loaded
    memory_ratio : share of free_before_bytes that weights, workspace and pools may take together
    other_pools_bytes : pools that are planned beside this one and not yet allocated
    workspace_bytes : what computing takes at its peak: activations, scratch, captured graphs
    """

    free_before_bytes: int
    free_after_bytes: int
    memory_ratio: float
    other_pools_bytes: int = 0
    workspace_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("free_before", "free_after", "other_pools", "workspace"):
            whole_number(f"{name}_bytes", getattr(self, f"{name}_bytes"), 0, BudgetError)
        ratio: object = self.memory_ratio
        number = isinstance(ratio, int | float) and not isinstance(ratio, bool)
        if not number or not 0 < self.memory_ratio <= 1:
            raise BudgetError(f"memory_ratio must be a number above 0 and at most 1, got {ratio!r}")

    @property
    def weights_bytes(self) -> int:
        """Bytes that loading took."""
        return self.free_before_bytes - self.free_after_bytes

    @property
    def available_bytes(self) -> int:
        """Bytes for a pool whose size nobody named; below 0 when the rest exceeds its share."""
        return (
            int(self.memory_ratio * self.free_before_bytes)
            - self.weights_bytes
            - self.other_pools_bytes
            - self.workspace_bytes
        )

    @property
    def largest_bytes(self) -> int:
        """Bytes for a pool whose size a user named: memory_ratio does not bind it."""
        return self.free_after_bytes - self.other_pools_bytes - self.workspace_bytes

    def pages(self, plan: PoolPlan) -> int:
        """Most pages whose pool fits `available_bytes`; `BudgetError` when fewer than two do."""
        available = self.available_bytes
        if available < 0:
            raise BudgetError(
                f"nothing is left for the cache, {-available:,} bytes are missing before its "
                f"first: {self._terms()}; use smaller weights, free what other processes hold, "
                "compute fewer tokens a step or raise memory_ratio"
            )
        pages = plan.pages_for(available)
        if pages < FEWEST_PAGES:
            raise BudgetError(
                f"the smallest cache needs {plan.nbytes(FEWEST_PAGES):,} bytes ({_price(plan)}, "
                f"{FEWEST_PAGES} pages) and {available:,} are available: {self._terms()}; choose "
                "a codec of fewer bits, allow fewer requests at once or raise memory_ratio"
            )
        return pages

    def obey(
        self, plan: PoolPlan, *, num_tokens: int | None = None, num_pages: int | None = None
    ) -> int:
        """The pages that a user asked for, exactly; `BudgetError` when `largest_bytes` is less.

        Exactly one of num_tokens (a multiple of the plan's page_tokens) and num_pages is given.
        One page will do: the two that `pages` insists on bind a size that nobody named.
        """
        if (num_tokens is None) == (num_pages is None):
            raise BudgetError(
                f"give either num_tokens or num_pages, got {num_tokens} and {num_pages}"
            )
        if num_tokens is None:
            pages = whole_number("num_pages", num_pages, 1, BudgetError)
        else:
            pages, rest = divmod(
                whole_number("num_tokens", num_tokens, 1, BudgetError), plan.page_tokens
            )
            if rest:
                near = [n * plan.page_tokens for n in (pages, pages + 1) if n]
                raise BudgetError(
                    f"num_tokens must be a multiple of the {plan.page_tokens} tokens of a page, "
                    f"got {num_tokens}; take {' or '.join(map(str, near))}"
                )
        largest = self.largest_bytes
        if plan.nbytes(pages) > largest:
            fit = plan.pages_for(max(0, largest))
            raise BudgetError(
                f"a cache of {pages} pages of {plan.page_tokens} tokens needs "
                f"{plan.nbytes(pages):,} bytes ({_price(plan)}) and {largest:,} are free: "
                f"{self.free_after_bytes:,} after loading, less {self.other_pools_bytes:,} for "
                f"other pools and {self.workspace_bytes:,} of workspace; at most {fit} pages, "
                f"{fit * plan.page_tokens} tokens, fit"
            )
        return pages

    def _terms(self) -> str:
        return (
            f"{self.memory_ratio:g} of the {self.free_before_bytes:,} bytes free before loading, "
            f"less {self.weights_bytes:,} of weights, {self.other_pools_bytes:,} for other pools "
            f"and {self.workspace_bytes:,} of workspace"
        )


def smallest(budgets: Sequence[Budget], plan: PoolPlan) -> int:
    """Pages that every rank can hold: those of the rank that can hold fewest.

    `BudgetError` names the first rank that has too little memory.
    """
    if not budgets:
        raise BudgetError("give the budget of each rank, at least of one")
    pages = []
    for rank, budget in enumerate(budgets):
        try:
            pages.append(budget.pages(plan))
        except BudgetError as error:
            raise BudgetError(f"rank {rank} of {len(budgets)}: {error}") from error
    return min(pages)


def _price(plan: PoolPlan) -> str:
    return f"{plan.fixed_bytes:,} fixed, {plan.page_bytes:,} a page"
