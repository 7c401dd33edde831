"""Results over two parts of the keys that a request's rows see, as one."""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_attention.triton.partials import narrow
from kvq_attention.triton.softmax import LOG2_E, LOWEST, log2_sink

INTEGERS = [
    *("one_head", "one_token", "two_head", "two_token", "out_head", "out_token"),
    *("one_lse_head", "two_lse_head", "kept_lse_head", "queries"),
]


@triton.jit(do_not_specialize=INTEGERS)
def join(
    one,
    one_lse,
    two,
    two_lse,
    out,
    kept_lse,
    sinks,
    units,
    one_head,
    one_token,
    two_head,
    two_token,
    out_head,
    out_token,
    one_lse_head,
    two_lse_head,
    kept_lse_head,
    queries,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    TWO: tl.constexpr,
    KEPT: tl.constexpr,
    SINKS: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Means [heads, queries, DIM] of one and, if TWO, another part, by natural logs of weights.

    KEPT: more parts follow, and the logs of what both weigh are written to kept_lse; else the sinks
    [heads] have their share and, UNITS, values are divided by units [heads / GROUP], powers of two.
    out may be one. A program takes ROWS queries of a head.
    """
    head = tl.program_id(1)
    query = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    asked = query < queries
    column = tl.arange(0, WIDTH)
    there = asked[:, None] & (column < DIM)[None, :]
    at = query.to(tl.int64)
    wide = head.to(tl.int64)
    one_rows = one + wide * one_head + at * one_token
    means = tl.load(one_rows[:, None] + column[None, :], mask=there, other=0.0).to(tl.float32)
    log = tl.load(one_lse + wide * one_lse_head + at, mask=asked, other=0.0) * LOG2_E
    top = tl.maximum(log, LOWEST)
    if TWO:
        other = tl.load(two_lse + wide * two_lse_head + at, mask=asked, other=0.0) * LOG2_E
        top = tl.maximum(top, other)
    if SINKS:
        sink = log2_sink(tl.load(sinks + head))
        top = tl.maximum(top, sink)
    share = tl.exp2(log - top)
    weight = share
    total = means * share[:, None]
    if TWO:
        two_rows = two + wide * two_head + at * two_token
        means = tl.load(two_rows[:, None] + column[None, :], mask=there, other=0.0).to(tl.float32)
        share = tl.exp2(other - top)
        weight += share
        total += means * share[:, None]
    if KEPT:
        logs = (top + tl.log2(weight)) / LOG2_E
        tl.store(kept_lse + wide * kept_lse_head + at, logs, mask=asked)
    if SINKS:
        weight += tl.exp2(sink - top)
    means = total / weight[:, None]
    if UNITS:
        means *= 1.0 / tl.load(units + head // GROUP)
    means = narrow(means, out.dtype.element_ty)
    out_rows = out + wide * out_head + at * out_token
    tl.store(out_rows[:, None] + column[None, :], means, mask=there)
