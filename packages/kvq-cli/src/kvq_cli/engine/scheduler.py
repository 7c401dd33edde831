"""Who computes how many tokens in the next step. Order is arrival order, always."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from kvq_cli.engine.request import Request
from kvq_pools import CacheSpace, OutOfPages, PrefixHit, SequencePages


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step's work.

    Attributes
    ----------
    decodes : requests that compute their newest token, one each
    extends : (request, tokens of its prefill to compute)
    """

    decodes: list[Request] = field(default_factory=list)
    extends: list[tuple[Request, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.decodes or self.extends)

    @property
    def work(self) -> list[tuple[Request, int]]:
        """(request, tokens that it computes), in the order in which the model sees them."""
        return [*((request, 1) for request in self.decodes), *self.extends]

    def apart(self) -> Iterator[Schedule]:
        """The same work, a request at a time."""
        for request in self.decodes:
            yield Schedule(decodes=[request])
        for extend in self.extends:
            yield Schedule(extends=[extend])


class Scheduler:
    """Running requests, waiting requests, and the pages between them.

    Every running request decodes in every step; prefills share `max_prefill_tokens` a step, which
    is the user's number whatever the size of the pool. A request is admitted when its whole
    prefill has room; what the prefix cache holds of it is not computed again. When pages run out
    the request that arrived last gives its pages back and is computed again later: nobody who came
    earlier waits for somebody who came later, and nothing is lost.
    """

    def __init__(
        self, space: CacheSpace, *, max_running_requests: int, max_prefill_tokens: int
    ) -> None:
        self.space = space
        self.max_running_requests = max_running_requests
        self.max_prefill_tokens = max_prefill_tokens
        self.running: list[Request] = []  # in order of arrival
        self.waiting: deque[Request] = deque()  # likewise, all after the running ones
        self.preemptions_total = 0
        self._preempted_in_step = False
        self._refused: tuple[object, ...] = ()  # the state in which the first one had to wait

    def add(self, request: Request) -> None:
        """Queue a request behind those that came before it."""
        if not self.waiting or self.waiting[-1].arrival < request.arrival:
            self.waiting.append(request)
        else:
            insort(self.waiting, request, key=_arrival)

    def fork(self, request: Request, twin: Request) -> bool:
        """Let `twin` go on from where `request` is, on the same pages.

        Without room for it now it waits for its turn, to be computed for itself; then False.
        """
        assert request.pages is not None
        if len(self.running) < self.max_running_requests:
            try:
                twin.pages = request.pages.fork()
            except OutOfPages:
                pass
            else:
                twin.num_computed, twin.prefill_until = request.num_computed, request.prefill_until
                twin.cached_tokens = request.cached_tokens
                insort(self.running, twin, key=_arrival)
                return True
        self.add(twin)
        return False

    def remove(self, request: Request) -> None:
        """Forget a request (finished or cancelled); its pages go to the prefix cache."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        if request.pages is not None:
            request.pages.close()
            request.pages = None

    def requeue(self, dropped: Collection[SequencePages]) -> int:
        """After a rebuild: who lost its pages waits for new ones, and so do all that came later.

        Returns how many.
        """
        self._refused = ()
        lost = [i for i, request in enumerate(self.running) if request.pages in dropped]
        if not lost:
            return 0
        again = self.running[lost[0] :]
        for request in reversed(again):
            self._preempt(request)
        return len(again)

    def schedule(self) -> Schedule:
        """Plan a step; pages for its tokens are reserved on return."""
        step = Schedule()
        self._preempted_in_step = False
        for request in list(self.running):
            # an earlier request of this loop may have preempted this one
            if request.pages is not None and request.decoding and self._reserve(request, 1):
                step.decodes.append(request)
        budget = self.max_prefill_tokens
        for request in list(self.running):
            if budget and request.pages is not None and not request.decoding:
                budget -= self._extend(request, budget, step)
        if self._preempted_in_step:
            # a prefill may have taken the pages of a decode planned above
            step.decodes[:] = [r for r in step.decodes if r.pages is not None]
            return step
        while budget and (admitted := self._admit_next()):
            if not admitted.decoding:
                budget -= self._extend(admitted, budget, step)
            elif self._reserve(admitted, 1):
                step.decodes.append(admitted)
        return step

    def _admit_next(self) -> Request | None:
        """Move the first waiting request to the running ones if its whole prefill has room."""
        taken = sum(1 + len(request.pending_twins) for request in self.running)
        if not self.waiting or taken >= self.max_running_requests:
            return None
        request = self.waiting[0]
        promised = [
            (r.pages, r.prefill_until)
            for r in self.running
            if r.pages is not None and not r.decoding
        ]
        owed = sum(goal - pages.num_computed for pages, goal in promised)
        free = [self.space.num_free(tier.name) for tier in self.space.plan.tiers]
        state = request.arrival, owed, free
        if state == self._refused:
            return None  # hashing a long prompt in every step would tell nothing new
        hit = self.space.lookup(request.tokens)
        if not self.space.can_open(
            len(request.tokens), self.max_prefill_tokens, hit, promised=promised
        ):
            self._refused = state
            return None
        first = request.cached_tokens is None
        request.pages = self.space.open(request.tokens, count=first)
        request.num_computed = request.pages.num_computed
        if first:
            request.cached_tokens = request.num_computed
        # one that ran before and lost nothing goes on as it would have
        whole = request.completion_tokens and request.num_computed == len(request.tokens) - 1
        request.prefill_until = request.num_computed if whole else len(request.tokens)
        request.stops = self._stops(request, hit)
        self.running.append(self.waiting.popleft())
        return request

    def _stops(self, request: Request, hit: PrefixHit) -> tuple[int, ...]:
        """The ends of pages where somebody may go on from the state that is there.

        The same conversation does behind its prompt. Those that begin alike part where the pages
        of others end, which lacked a snapshot there.
        """
        if not self.space.num_snapshots:
            return ()
        page_tokens = self.space.plan.page_tokens
        ends = hit.matched, request.prefill_until - 1
        stops = {end // page_tokens * page_tokens for end in ends}
        return tuple(sorted(stop for stop in stops if stop > request.num_computed))

    def keep(self, step: Schedule) -> None:
        """After a step: snapshots of the prefills that are at the end of a page now."""
        if not self.space.num_snapshots:
            return
        for request, _ in step.extends:
            if request.pages is not None and not request.num_computed % self.space.plan.page_tokens:
                request.pages.keep(passed=request.num_computed not in request.stops)

    def _extend(self, request: Request, budget: int, step: Schedule) -> int:
        goals = (*request.stops, request.prefill_until)
        goal = min(goal for goal in goals if goal > request.num_computed)
        count = min(budget, goal - request.num_computed)
        if self.space.num_snapshots and request.num_computed + count < goal:
            # whatever the step has left, a chunk better ends where a snapshot can be had
            past = (request.num_computed + count) % self.space.plan.page_tokens
            count -= past if past < count else 0
        if not self._reserve(request, count):
            return 0
        step.extends.append((request, count))
        return count

    def _reserve(self, request: Request, count: int) -> bool:
        """Pages for `count` more tokens, preempting those that came later; False = preempted."""
        assert request.pages is not None
        goal = request.num_computed + count
        while not self.space.can_grow(request.pages, goal):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        request.pages.grow(goal)
        return True

    def _preempt(self, request: Request) -> None:
        assert request.pages is not None
        self._preempted_in_step = True
        self.preemptions_total += 1
        self.running.remove(request)
        request.pages.close()  # what was computed stays in the prefix cache while there is room
        request.pages = None
        request.num_computed = 0
        self.add(request)


def _arrival(request: Request) -> int:
    return request.arrival
