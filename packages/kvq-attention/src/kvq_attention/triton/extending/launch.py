"""Extend: attention over a step's own rows and the packed tokens before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from kvq_attention import launches
from kvq_attention.batch import Batch, Request
from kvq_attention.errors import UnsupportedError
from kvq_attention.routes import DENSE, LOOP, SCRATCH, Route
from kvq_attention.scoring import Scoring
from kvq_attention.triton.extending import dense, routes
from kvq_attention.triton.extending.scratch import extend_through
from kvq_attention.triton.extending.step import Step
from kvq_attention.triton.extending.within import extend_within
from kvq_attention.triton.side import Side
from kvq_codecs import Encoded


def extend_routes() -> tuple[Route, ...]:
    """Decoding within the loop, through a scratch, and dense kernels where sizes are known."""
    return Route(LOOP), Route(SCRATCH, routes.BREAK_EVEN), Route(DENSE, dense.TRIED_ROWS)


def extend_reads_host(queries: int, past: int, heads: int, dim: int) -> bool:
    """Whether dense kernels may take such a request, which know its sizes from the host."""
    return dense.products(queries, past, heads, dim) >= dense.FEWEST_PRODUCTS


def extend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: Encoded,
    v_cache: Encoded,
    batch: Batch,
    tier: str,
    scoring: Scoring,
    scratch_bytes: int,
    route: Route | None = None,
) -> torch.Tensor:
    """Attend over the step's own rows and the cache: see `kvq_attention.ops.extend`."""
    sides = Side.of(k_cache, q.dtype), Side.of(v_cache, q.dtype)
    step = Step.of(q, k, v, sides, batch, tier, scoring)
    formats = k_cache.spec.name, v_cache.spec.name
    call = _Call(step, sides, k_cache.lead[0], formats, scratch_bytes)
    if step.out.numel() == 0:
        return step.out
    if route is not None:
        call.refuse(route, batch.host)
    launches.record("triton", "extend")
    if route is not None and route.name == LOOP:
        call.within(most=0)
    elif route is not None and route.name == SCRATCH:
        call.by_rows(batch.host, route.rows)
    else:
        call.by_sizes(batch.host, None if route is None else route.rows)
    return step.out


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """What all routes are given."""

    step: Step
    sides: tuple[Side, Side]
    num_pages: int
    formats: tuple[str, str]
    scratch_bytes: int

    def refuse(self, route: Route, host: tuple[Request, ...] | None) -> None:
        """Raise `UnsupportedError` where no request can take a route."""
        if route.name == SCRATCH and self.through(route.rows).plan is None:
            raise UnsupportedError(
                "nothing of this step goes through a scratch: K or V must be packed, here "
                f"{' and '.join(self.formats)}, a request must have {route.rows} query rows and a "
                f"past, and {self.scratch_bytes:,} bytes of scratch must hold a part of it"
            )
        if route.name == DENSE and not (host and self.known(host, route.rows)):
            raise UnsupportedError(
                "dense kernels take nothing of this step: Batch.host must tell of a request of "
                f"{route.rows} query rows or more, whose results {self.scratch_bytes:,} bytes of "
                "scratch hold; there must be no fp32 cache, no window and no soft cap, a positive "
                "scale, one head_dim, one dtype of q, k and v, and a kernel of torch for these"
            )

    def known(self, host: tuple[Request, ...], fewest: int | None) -> dense.Known | None:
        """What dense kernels take: see `dense.choose`."""
        given = self.step, self.sides, self.formats, host, self.scratch_bytes
        return dense.choose(*given, fewest)

    def by_sizes(self, host: tuple[Request, ...] | None, fewest: int | None) -> None:
        """Requests that dense kernels take, where a host knows of any, and others by their rows."""
        known = self.known(host, fewest) if host else None
        if known is None or not host:
            self.by_rows(host, routes.BREAK_EVEN)
            return
        launches.record_route("triton", "extend", f"{DENSE} ({known.kernel.name})")
        for densely, found in groupby(host, lambda request: request in known.requests):
            requests = list(found)
            first, last = requests[0], requests[-1]
            if densely:
                for request in requests:
                    given = self.step, self.sides, self.num_pages, request, known
                    dense.extend_densely(*given, self.scratch_bytes)
            else:
                some = self.step.requests(first.index, first.start, len(requests), last.stop)
                replace(self, step=some).by_rows(requests, routes.BREAK_EVEN)
        self.step.out[host[-1].stop :] = 0  # padding

    def through(self, break_even: int) -> routes.Route:
        """The requests that go through a scratch."""
        step, (k, v) = self.step, self.sides
        return routes.choose(
            self.formats,
            (k.dim, v.dim),
            num_tokens=step.num_tokens,
            requests=step.num_requests,
            kv_heads=step.kv_heads,
            group=step.group,
            visible=step.visible,
            tile=step.shape.tokens,
            scratch_bytes=self.scratch_bytes,
            break_even=break_even,
        )

    def by_rows(self, host: Sequence[Request] | None, break_even: int) -> None:
        """Requests through a scratch or not, by their query rows, which a device knows."""
        route = self.through(break_even)
        counts = [request.queries * self.step.group for request in host or ()]
        # What a host knows saves launches that would find nothing.
        through = route.plan is not None and (not host or max(counts) >= route.fewest)
        below = route.fewest != 1 and (not host or min(counts) < route.fewest)
        if below or not through:
            self.within(max(0, route.fewest - 1))
        if route.plan is not None and through:
            launches.record_route("triton", "extend", SCRATCH)
            extend_through(
                *(self.step, self.sides, routes.packed(self.formats), self.num_pages),
                *(route.requests, route.plan, route.fewest),
            )

    def within(self, most: int) -> None:
        """Requests of so many query rows at most within the loop; 0 = all."""
        launches.record_route("triton", "extend", LOOP)
        extend_within(self.step, *self.sides, self.num_pages, most)
