"""The route of dense kernels: a request's past is decoded, and torch's kernels attend.

They take one request whose sizes the host knows, and neither a window nor a soft cap. The past goes
through a bounded scratch, in parts (see `portions`); results over parts are joined by what each
weighs. Packed rows become fp16, all of a head brought into its range by powers of two, which keeps
more of them than bf16 would; bf16 and fp16 caches are read as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvq_attention.batch import Request
from kvq_attention.dense import Dense, fastest
from kvq_attention.triton.extending import portions
from kvq_attention.triton.extending.heads import Heads
from kvq_attention.triton.extending.portions import Sizes
from kvq_attention.triton.extending.step import Step
from kvq_attention.triton.side import Side

# Pairs (query row × key of a KV head) times values a row, of all heads, from which on dense kernels
# save more than their launches cost: within steps of a model on an H200 (2.5 ms of launches a
# layer), 1,024 tokens over 8,192 of 8 KV heads of 4 × 128 are slower by 0.4 ms with them, 2,048
# are faster by 0.6 to 0.9 ms.
FEWEST_PRODUCTS = 1 << 36
# Calls of a dense kernel that so many products are enough for: more are made where memory is short.
CALLS = 8
TRIED_ROWS = 2048  # query rows of a request by which they are tried


@dataclass(frozen=True, slots=True)
class Known:
    """What dense kernels take of a step.

    Attributes
    ----------
    kernel : the dense kernel
    plain : rows are multiplied as they are
    requests : that they take
    """

    kernel: Dense
    plain: bool
    requests: frozenset[Request]


def choose(
    step: Step,
    sides: tuple[Side, Side],
    formats: tuple[str, str],
    host: tuple[Request, ...],
    scratch_bytes: int,
    fewest: int | None = None,
) -> Known | None:
    """What dense kernels take, by a request's own lengths alone. None: nothing.

    fewest : query rows of a request from which on; None = by the products that it needs
    """
    scoring, (k, v) = step.scoring, sides
    served = scoring.window is None and scoring.softcap is None and k.dim == v.dim
    served &= scoring.scale > 0  # a mask of −∞ is multiplied by it
    served &= "fp32" not in formats  # which fp16 would round
    alike = step.q.dtype == step.k.dtype == step.v.dtype
    if not served or not alike:
        return None
    sizes = Sizes(k.dim, step.group)
    most = sizes.most_queries(scratch_bytes)

    def takes(request: Request) -> bool:
        if request.length == 0 or request.queries > most:  # padding, or no room
            return False
        if fewest is not None:
            return request.queries * step.group >= fewest
        past = max(0, request.first_position)
        asked = products(request.queries, past, step.kv_heads * step.group, k.dim)
        if asked < FEWEST_PRODUCTS:
            return False
        planned = sizes.plan(request.queries, past, step.kv_heads, scratch_bytes)
        calls = step.kv_heads // planned.heads * (1 + portions.count(past, planned.share))
        least = FEWEST_PRODUCTS * max(1.0, calls / CALLS)
        return asked >= least

    taken = frozenset(request for request in host if takes(request))
    own = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(step.q.dtype)
    plain = formats == (own, own)
    dtype = step.q.dtype if plain else torch.float16
    kernel = fastest(step.q.device, dtype, k.dim) if taken else None
    return None if kernel is None else Known(kernel, plain, taken)


def products(queries: int, past: int, heads: int, dim: int) -> int:
    """Pairs of a query and a key that it sees, about, times values a row, of all query heads."""
    return queries * (past + queries // 2) * heads * dim


def extend_densely(
    step: Step,
    sides: tuple[Side, Side],
    num_pages: int,
    request: Request,
    known: Known,
    scratch_bytes: int,
) -> None:
    """Write one request's results."""
    past = request.first_position
    if past > step.reach:  # pages are needed for which the table has no column
        step.out[request.start : request.stop] = float("nan")
        return
    planned = Sizes(sides[0].dim, step.group).plan(
        request.queries, past, step.kv_heads, scratch_bytes
    )
    dtype = step.q.dtype if known.plain else torch.float16
    scratch = step.q.new_empty(planned.heads * planned.share * 2 * sides[0].dim, dtype=dtype)
    for first in range(0, step.kv_heads, planned.heads):
        heads = Heads.of(step, sides, num_pages, request, range(first, first + planned.heads))
        _attend(heads, known, planned, scratch)


def _attend(heads: Heads, known: Known, planned: portions.Plan, scratch: torch.Tensor) -> None:
    """Write the results of some heads; what it takes beside `scratch` is free when it returns."""
    attend, scale = known.kernel.attend, heads.step.scoring.scale
    past = heads.request.first_position
    peaks = None if known.plain else heads.peaks()
    q, k, v = heads.placed(planned.rows, scratch.dtype, peaks)
    found = attend(q, k, v, True, scale)
    for low, high in portions.parts(past, planned.share):
        keys, values = heads.decoded(low, high, scratch, peaks)
        more = attend(q, keys, values, False, scale)
        if high + heads.before < past:
            found = heads.kept(found, more)
        else:
            heads.finish(found, more, peaks)
    if past == heads.before:
        heads.finish(found, None, peaks)
