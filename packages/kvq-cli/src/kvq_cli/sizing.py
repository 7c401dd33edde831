"""How large a model's pool may be: the budget, the workspace, and what requests can use."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvq_cli.config import ModelGeometry, pages_per_request, workspace
from kvq_pools import Budget, BudgetError, PoolPlan

# A conversation has one behind its prompt and one behind its answer.
FEWEST_SNAPSHOTS = 4


def default_snapshots(max_running_requests: int) -> int:
    """As many as requests run at once: whoever is served at the same time can be again."""
    return max(FEWEST_SNAPSHOTS, max_running_requests)


@dataclass(frozen=True, slots=True)
class Limits:
    """What is let happen at once.

    Attributes
    ----------
    context : most tokens of a request
    page_tokens : tokens of a page
    max_prefill_tokens : most prompt tokens computed in a step
    value_bytes, on_host, by_reference, packed_prefill, scratch_bytes, graph_rows, graph_tokens,
        ranks : as in `workspace`
    workspace_bytes : known beforehand; None = estimated
    state_snapshots : states of linear-attention layers beside those of running requests
    """

    context: int
    page_tokens: int
    max_running_requests: int
    max_prefill_tokens: int
    value_bytes: int = 2
    on_host: bool = False
    by_reference: bool = True
    packed_prefill: bool = False
    scratch_bytes: int = 0
    graph_rows: int = 0
    graph_tokens: int = 0
    ranks: int = 1
    workspace_bytes: int | None = None
    state_snapshots: int = 0

    def request_pages(self, model: ModelGeometry, num_tokens: int) -> int:
        """Most growing pages that a request of `num_tokens` holds at once."""
        return pages_per_request(
            model,
            num_tokens,
            page_tokens=self.page_tokens,
            max_prefill_tokens=self.max_prefill_tokens,
        )

    def useful_pages(self, model: ModelGeometry) -> int:
        """Pages beyond which as many requests as may run at once cannot use any."""
        return self.request_pages(model, self.context) * self.max_running_requests

    def state_bytes(self, model: ModelGeometry) -> int:
        """Bytes of the states of requests that run."""
        return self.max_running_requests * self._state_bytes(model)

    def snapshot_bytes(self, model: ModelGeometry) -> int:
        """Bytes of the states that are kept beside."""
        return self.state_snapshots * self._state_bytes(model)

    def _state_bytes(self, model: ModelGeometry) -> int:
        return 0 if model.state is None else model.state.request_bytes(self.ranks, self.value_bytes)

    def needs(self, model: ModelGeometry, context: int) -> int:
        """Bytes of workspace while no request is longer than `context`."""
        if self.workspace_bytes is not None:
            return self.workspace_bytes
        return workspace(
            model,
            context=context,
            max_running_requests=self.max_running_requests,
            max_prefill_tokens=self.max_prefill_tokens,
            value_bytes=self.value_bytes,
            on_host=self.on_host,
            by_reference=self.by_reference,
            packed_prefill=self.packed_prefill,
            scratch_bytes=self.scratch_bytes,
            graph_rows=self.graph_rows,
            graph_tokens=self.graph_tokens,
            ranks=self.ranks,
        ).nbytes


@dataclass(frozen=True, slots=True)
class Sizing:
    """A pool, and what computing over it takes.

    Attributes
    ----------
    pages : of the tiers that grow
    context : most tokens of a request: its pages fit, and the workspace is enough for it
    """

    pages: int
    context: int
    workspace_bytes: int


def largest(model: ModelGeometry, plan: PoolPlan, limits: Limits, budget: Budget) -> Sizing:
    """The most pages that leave room for the workspace of the longest request they hold.

    Pages and workspace compete: the longer a request may be, the more of it is decoded at once.
    Where limits.context does not fit, the longest context that does is found by bisection.

    Parameters
    ----------
    budget : without the workspace, which is added here

    Raises `kvq_pools.BudgetError` when not even a request of one page fits.
    """

    def sized(context: int) -> Sizing:
        needed = limits.needs(model, context)
        return Sizing(replace(budget, workspace_bytes=needed).pages(plan), context, needed)

    def fits(context: int) -> bool:
        try:
            return limits.request_pages(model, context) <= sized(context).pages
        except BudgetError:
            return False

    if fits(limits.context):
        return sized(limits.context)
    fitting, beyond = 1, -(-limits.context // limits.page_tokens)  # in pages of tokens
    while beyond - fitting > 1:
        middle = (fitting + beyond) // 2
        if fits(middle * limits.page_tokens):
            fitting = middle
        else:
            beyond = middle
    return sized(min(fitting * limits.page_tokens, limits.context))


def named(
    model: ModelGeometry, plan: PoolPlan, limits: Limits, budget: Budget, num_tokens: int
) -> Sizing:
    """The pages of `num_tokens`, exactly. Raises `kvq_pools.BudgetError` when they do not fit."""
    # where every layer forgets, a request may be longer than the pool
    context = min(limits.context, num_tokens) if model.full_layers else limits.context
    needed = limits.needs(model, context)
    pages = replace(budget, workspace_bytes=needed).obey(plan, num_tokens=num_tokens)
    return Sizing(pages, context, needed)


def chosen(
    model: ModelGeometry,
    plan: PoolPlan,
    limits: Limits,
    budget: Budget,
    num_tokens: int | None = None,
) -> Sizing:
    """A pool as asked, or of what memory allows and requests can use.

    Its pages may hold more than `context`: requests share them, and none may be longer than what
    the workspace is for.

    Raises `kvq_pools.BudgetError`.
    """
    if num_tokens is not None:
        return named(model, plan, limits, budget, num_tokens)
    size = largest(model, plan, limits, budget)
    return replace(size, pages=min(size.pages, limits.useful_pages(model)))
