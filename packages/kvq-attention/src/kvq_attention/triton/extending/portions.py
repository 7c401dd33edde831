"""In what sizes dense kernels are given a request: few different ones, within a bound of bytes.

cuDNN makes a plan for each size, which takes it 40 ms. So rows are padded, to a sixteenth more at
worst where they are many, and a past is cut into parts of few sizes. What is left of a past is put
before the request's own rows, where a causal mask lets all of them see it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

GRAIN = 128  # tokens of the smallest part, and rows that sizes are multiples of
MOST_SHARE = 16384  # tokens of the largest part: what is joined per part costs little beside it
# Tokens of a part from which on it fills a GPU; fewer heads are taken at a time to have as many.
ENOUGH = 2048
HALF_BYTES, FLOAT_BYTES = 2, 4


def padded(rows: int) -> int:
    """The size for so many rows, at least as many."""
    step = _step(rows)
    return -(-rows // step) * step


def _step(rows: int) -> int:
    return max(GRAIN, 1 << (rows - 1).bit_length() >> 5)


def before(past: int) -> int:
    """Tokens of a past that are put before the own rows."""
    return past % GRAIN


def parts(past: int, share: int) -> Iterator[tuple[int, int]]:
    """The others, [low, high) each, of `share` tokens or less."""
    low, end = 0, past - before(past)
    while low < end:
        high = low + min(share, _part(end - low))
        yield low, high
        low = high


def count(past: int, share: int) -> int:
    """How many parts that are."""
    whole, size = past - before(past), min(share, _part(past))
    if size == 0:
        return 0
    rest = whole % size
    return whole // size + sum(1 for _ in parts(rest, size))


def _part(tokens: int) -> int:
    """The largest size of a part that is not above: 1, 2, 3 or, to a power of two, 4 … 7 grains."""
    grains = tokens // GRAIN
    spare = max(0, grains.bit_length() - 3)
    return (grains >> spare << spare) * GRAIN


@dataclass(frozen=True, slots=True)
class Plan:
    """How a request is served.

    Attributes
    ----------
    heads : KV heads at a time
    rows : of queries and own keys, padded
    share : tokens of the largest part of the past, 0 = there is none
    nbytes : of decoded parts, placed rows, results over parts, and what is kept between them
    """

    heads: int
    rows: int
    share: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one KV head.

    Attributes
    ----------
    dim : values a row of K and of V
    group : query heads
    """

    dim: int
    group: int

    @property
    def token_bytes(self) -> int:
        """Of a decoded token, K and V."""
        return 2 * self.dim * HALF_BYTES

    @property
    def row_bytes(self) -> int:
        """Of a row of queries and own keys: placed, its results of two parts and those kept."""
        placed = (self.group + 2) * self.dim * HALF_BYTES
        results = 2 * self.group * (self.dim * HALF_BYTES + FLOAT_BYTES)
        kept = self.group * (self.dim * FLOAT_BYTES + FLOAT_BYTES)
        return placed + results + kept

    def most_queries(self, scratch_bytes: int) -> int:
        """Query tokens of the largest request that the bound holds, whatever its past."""
        rows = (scratch_bytes - GRAIN * self.token_bytes) // self.row_bytes
        if rows < GRAIN:
            return 0
        step = _step(rows)
        return rows // step * step - (GRAIN - 1)

    def plan(self, queries: int, past: int, kv_heads: int, scratch_bytes: int) -> Plan:
        """As many heads as there is room for, with parts that are large enough.

        `queries` must not be more than `most_queries`.
        """
        rows = padded(before(past) + queries)
        wanted = min(MOST_SHARE, _part(past))
        plans = (
            self._plan(heads, rows, wanted, scratch_bytes // heads)
            for heads in range(kv_heads, 0, -1)
            if kv_heads % heads == 0
        )
        return next(
            plan
            for plan in plans
            if plan.heads == 1
            or (plan.nbytes <= scratch_bytes and plan.share >= min(wanted, ENOUGH))
        )

    def _plan(self, heads: int, rows: int, share: int, head_bytes: int) -> Plan:
        """For so many heads; with parts of `share` tokens, or less if there is no room for them."""
        placed = rows * self.row_bytes
        room = (head_bytes - placed) // self.token_bytes
        share = max(min(share, GRAIN), min(share, _part(max(0, room))))
        return Plan(heads, rows, share, heads * (placed + share * self.token_bytes))
