"""Results over two parts of the keys that a request's rows see, as one."""

from __future__ import annotations

import triton.language as tl

from kvq_attention.triton.extending.halves import VALUES, unit
from kvq_attention.triton.jit import kernel
from kvq_attention.triton.partials import narrow
from kvq_attention.triton.softmax import LOG2_E, LOWEST, log2_sink

# Of rows of any number; strides between rows are specialized, as they tell how wide a load may be.
INTEGERS = ["one_lse_head", "two_lse_head", "skipped", "rows"]


@kernel(do_not_specialize=INTEGERS)
def join(
    one,
    one_lse,
    two,
    two_lse,
    out,
    kept_lse,
    sinks,
    peaks,
    one_head,
    one_token,
    two_head,
    two_token,
    out_head,
    out_token,
    one_lse_head,
    two_lse_head,
    skipped,
    rows,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    TWO: tl.constexpr,
    KEPT: tl.constexpr,
    SINKS: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Means [heads, rows, DIM] of one and, if TWO, another part, by natural logs of weights.

    skipped: rows of the parts before those that are joined. KEPT: more parts follow, and the logs
    of what both weigh are written to kept_lse, whose strides are one_lse's; else the sinks [heads]
    have their share and, UNITS, values lose the unit that follows from peaks [3, heads / GROUP].
    out may be one. A program takes ROWS rows of a head.
    """
    head = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    asked = row < rows
    column = tl.arange(0, WIDTH)
    there = asked[:, None] & (column < DIM)[None, :]
    at = row.to(tl.int64) + skipped
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
        tl.store(kept_lse + wide * one_lse_head + at, logs, mask=asked)
    if SINKS:
        weight += tl.exp2(sink - top)
    means = total / weight[:, None]
    if UNITS:
        means *= unit(peaks, VALUES, tl.num_programs(1) // GROUP, head // GROUP, True)
    means = narrow(means, out.dtype.element_ty)
    out_rows = out + wide * out_head + row.to(tl.int64) * out_token
    tl.store(out_rows[:, None] + column[None, :], means, mask=there)
