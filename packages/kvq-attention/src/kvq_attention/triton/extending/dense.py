"""The route of dense kernels: a request's past is decoded once, and torch's kernels attend.

They take one request whose sizes the host knows, and neither a window nor a soft cap. The past goes
through fp16 rows of as many KV heads as a bound holds, or parts of one head's; results over parts
are joined by what each weighs. All rows of a head are brought into fp16's range by powers of two,
which keeps more of them than bf16 would; bf16 and fp16 caches are read as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from kvq_attention.batch import Request
from kvq_attention.dense import Dense, fastest
from kvq_attention.rotation import quaternions
from kvq_attention.triton.compat import ptx_level
from kvq_attention.triton.extending.gather import gather, to_halves
from kvq_attention.triton.extending.join import join
from kvq_attention.triton.extending.scratch import some_heads
from kvq_attention.triton.extending.step import Step
from kvq_attention.triton.side import Side

# Query rows from which on dense kernels are the fastest.
FEWEST_ROWS = 4096
LEAST_SHARE = 256  # tokens of a part
ROWS = 16  # queries of a program that joins
TOKENS = 32  # of one that decodes or converts
LSE_BYTES = 4
VALUE_EXPONENT = 8  # of the largest value: sums of many that nearly cancel are no subnormals


@dataclass(frozen=True, slots=True)
class Plan:
    """How many KV heads are served at a time, how many tokens of their past, and in what memory.

    Attributes
    ----------
    heads, share : KV heads and tokens at a time
    nbytes : of decoded rows, converted own ones, results over parts, and what is kept between them
    """

    heads: int
    share: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one request and one KV head.

    Attributes
    ----------
    dim : values a row of K and of V
    group : query heads
    plain : own rows are read as they are
    """

    dim: int
    group: int
    plain: bool

    @property
    def token_bytes(self) -> int:
        """Of a decoded token, K and V."""
        return 2 * self.dim * 2

    def own_bytes(self, queries: int, *, kept: bool) -> int:
        """Of own rows and results over them and a part of the past; kept: and of those before."""
        results = 2 * self.group * (self.dim * 2 + LSE_BYTES)
        if kept:
            results += self.group * (self.dim * 4 + LSE_BYTES)
        converted = 0 if self.plain else (self.group + 2) * self.dim * 2
        return queries * (results + converted)

    def most_queries(self, scratch_bytes: int) -> int:
        """Query tokens of the largest request that the bound holds, whatever its past."""
        room = scratch_bytes - LEAST_SHARE * self.token_bytes
        return max(0, room // self.own_bytes(1, kept=True))


def plan(sizes: Sizes, queries: int, past: int, kv_heads: int, scratch_bytes: int) -> Plan:
    """All of the past of as many heads as there is room for, or parts of one head's.

    `queries` must not be more than `most_queries`.
    """
    head_bytes = past * sizes.token_bytes + sizes.own_bytes(queries, kept=False)
    heads = min(kv_heads, scratch_bytes // head_bytes)
    if heads:
        return Plan(heads, past, heads * head_bytes)
    kept = sizes.own_bytes(queries, kept=True)
    share = (scratch_bytes - kept) // sizes.token_bytes // TOKENS * TOKENS
    return Plan(1, share, kept + share * sizes.token_bytes)


@dataclass(frozen=True, slots=True)
class Known:
    """What dense kernels take of a step.

    Attributes
    ----------
    kernel : the dense kernel
    plain : rows are multiplied as they are
    fewest, most : query rows (query token × head of a KV head's group) of requests that it takes
    requests : those
    below, above : whether there are rows of requests of fewer, or of none, and of more
    """

    kernel: Dense
    plain: bool
    fewest: int
    most: int
    requests: list[Request]
    below: bool
    above: bool


def choose(
    step: Step,
    sides: tuple[Side, Side],
    formats: tuple[str, str],
    host: tuple[Request, ...] | None,
    scratch_bytes: int,
) -> Known | None:
    """What dense kernels take: by a request's own rows alone. None: nothing."""
    scoring, (k, v) = step.scoring, sides
    served = scoring.window is None and scoring.softcap is None and k.dim == v.dim
    alike = step.q.dtype == step.k.dtype == step.v.dtype
    if host is None or not served or not alike:
        return None
    own = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(step.q.dtype)
    plain = formats == (own, own)
    sizes = Sizes(k.dim, step.group, plain)
    most = sizes.most_queries(scratch_bytes) * step.group
    rows = {request: (request.stop - request.start) * step.group for request in host}
    taken = [request for request, count in rows.items() if FEWEST_ROWS <= count <= most]
    dtype = step.q.dtype if plain else torch.float16
    kernel = fastest(step.q.device, dtype, k.dim) if taken else None
    if kernel is None:
        return None
    padded = host[-1].stop < step.num_tokens
    return Known(
        kernel,
        plain,
        FEWEST_ROWS,
        most,
        taken,
        below=padded or any(0 < count < FEWEST_ROWS for count in rows.values()),
        above=any(count > most for count in rows.values()),
    )


def extend_densely(
    step: Step,
    sides: tuple[Side, Side],
    num_pages: int,
    request: Request,
    known: Known,
    scratch_bytes: int,
) -> None:
    """Write one request's results."""
    if request.length == 0:  # padding
        step.out[request.start : request.stop] = 0
        return
    past, queries = request.first_position, request.stop - request.start
    if past > step.reach:  # pages are needed for which the table has no column
        step.out[request.start : request.stop] = float("nan")
        return
    sizes = Sizes(sides[0].dim, step.group, known.plain)
    planned = plan(sizes, queries, past, step.kv_heads, scratch_bytes)
    dtype = step.q.dtype if known.plain else torch.float16
    scratch = step.q.new_empty(2, planned.heads, max(1, planned.share), sizes.dim, dtype=dtype)
    attend, scale = known.kernel.attend, step.scoring.scale
    for first in range(0, step.kv_heads, planned.heads):
        heads = range(first, min(first + planned.heads, step.kv_heads))
        some = _Some.of(step, sides, num_pages, request, heads)
        units = None if known.plain else some.units(past)
        q, k, v = some.own(units)
        found = attend(q, k, v, True, scale)
        for low in range(0, past, max(1, planned.share)):
            high = min(low + planned.share, past)
            rows = scratch[:, : len(heads), : high - low]
            some.gather(low, high, rows, units)
            part = attend(q, rows[0], rows[1], False, scale)
            if high == past:
                some.join(found, part, units)
            else:
                found = some.kept(found, part)
        if past == 0:
            some.join(found, None, units)


Found = tuple[torch.Tensor, torch.Tensor]  # means [heads, queries, dim] and natural logs


@dataclass(frozen=True, slots=True, eq=False)
class _Some:
    """One request and some of the KV heads."""

    step: Step
    k: Side
    v: Side
    num_pages: int
    request: Request
    heads: int

    @classmethod
    def of(
        cls,
        step: Step,
        sides: tuple[Side, Side],
        num_pages: int,
        request: Request,
        heads: range,
    ) -> _Some:
        k, v = sides
        if len(heads) < step.kv_heads:
            k, v, step = some_heads(k, heads), some_heads(v, heads), step.heads(heads)
        return cls(step, k, v, num_pages, request, len(heads))

    def units(self, past: int) -> torch.Tensor:
        """Powers of two [3, heads] that rows are multiplied by: keys', values', queries'.

        Queries' and keys' largest magnitudes become alike, as their products stay what they are.
        """
        peaks = self.step.q.new_zeros(2, self.heads, dtype=torch.float32)
        if past:
            self.gather(0, past, peaks, None, peaks)
        q, k, v = (
            torch.linalg.vector_norm(
                rows[self.request.start : self.request.stop].unflatten(1, (self.heads, -1)),
                float("inf"),
                (0, 2, 3),
                dtype=torch.float32,
            )
            for rows in (self.step.q, self.step.k, self.step.v)
        )
        largest = torch.stack([torch.maximum(peaks[0], k), torch.maximum(peaks[1], v), q])
        exponents = torch.frexp(largest).exponent.clamp(-120, 120)
        key, value, query = exponents.unbind()
        apart = (key - query) >> 1
        powers = torch.stack([-apart, VALUE_EXPONENT - value, apart])
        return torch.ldexp(torch.ones_like(largest), powers.clamp(-120, 120))

    def own(self, units: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The request's rows of the step, [heads, queries, dim]: q, k, v."""
        start, stop = self.request.start, self.request.stop
        q, k, v = (rows[start:stop] for rows in (self.step.q, self.step.k, self.step.v))
        if units is None:
            return q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        return self._halves(q, units[2]), self._halves(k, units[0]), self._halves(v, units[1])

    def _halves(self, rows: torch.Tensor, units: torch.Tensor) -> torch.Tensor:
        tokens, heads, dim = rows.shape
        target = rows.new_empty(heads, tokens, dim, dtype=torch.float16)
        to_halves[(triton.cdiv(tokens, TOKENS), heads)](
            *(rows, target, units, *rows.stride()[:2], tokens),
            DIM=dim,
            WIDTH=triton.next_power_of_2(dim),
            GROUP=heads // self.heads,
            TOKENS=TOKENS,
        )
        return target

    def gather(
        self,
        first: int,
        last: int,
        target: torch.Tensor,
        units: torch.Tensor | None,
        peaks: torch.Tensor | None = None,
    ) -> None:
        """Decode tokens [first, last) into target [2, heads, tokens, dim], or find their peaks."""
        k, v, device = self.k, self.v, self.step.q.device
        rotated = k.tile.rotated or v.tile.rotated
        gather[(triton.cdiv(last - first, TOKENS), self.heads, 2)](
            k.tensors,
            v.tensors,
            target,
            target if units is None else units,
            target if peaks is None else peaks.view(torch.int32),
            self.step.table[self.request.index],
            quaternions(device) if rotated else target,
            k.pages,
            v.pages,
            *target.stride()[:2],
            self.num_pages,
            first,
            last,
            **k.constants("K"),
            **v.constants("V"),
            K_FACTOR=k.tile.factor,
            V_FACTOR=v.tile.factor,
            HEADS=self.heads,
            UNITS=units is not None,
            MEASURE=peaks is not None,
            PAGE=self.step.page_tokens,
            TOKENS=TOKENS,
            ASM=ptx_level(device),
        )

    def kept(self, one: Found, two: Found) -> Found:
        """Both as one, in float32; in place from the second time on."""
        means, logs = one
        if means.dtype != torch.float32:
            means = means.float()
        self._join(one, two, means, None, logs, None)
        return means, logs

    def join(self, one: Found, two: Found | None, units: torch.Tensor | None) -> None:
        """Write the results, over one part or both."""
        out = self.step.out[self.request.start : self.request.stop].transpose(0, 1)
        values = None if units is None else units[1]
        self._join(one, two, out, self.step.scoring.sinks, None, values)

    def _join(
        self,
        one: Found,
        two: Found | None,
        out: torch.Tensor,
        sinks: torch.Tensor | None,
        kept: torch.Tensor | None,
        units: torch.Tensor | None,
    ) -> None:
        heads, queries, dim = out.shape
        (means, logs), (more, more_logs) = one, two or one
        join[(triton.cdiv(queries, ROWS), heads)](
            *(means, logs, more, more_logs, out),
            logs if kept is None else kept,
            logs if sinks is None else sinks,
            logs if units is None else units,
            *means.stride()[:2],
            *more.stride()[:2],
            *out.stride()[:2],
            logs.stride(0),
            more_logs.stride(0),
            logs.stride(0) if kept is None else kept.stride(0),
            queries,
            DIM=dim,
            WIDTH=triton.next_power_of_2(dim),
            ROWS=ROWS,
            GROUP=heads // self.heads,
            TWO=two is not None,
            KEPT=kept is not None,
            SINKS=sinks is not None,
            UNITS=units is not None,
        )
