"""The kernels' launches of one request and some of the KV heads, for dense kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvq_attention.batch import Request
from kvq_attention.rotation import quaternions
from kvq_attention.triton.compat import ptx_level
from kvq_attention.triton.extending import portions
from kvq_attention.triton.extending.gather import gather
from kvq_attention.triton.extending.halves import place
from kvq_attention.triton.extending.join import join
from kvq_attention.triton.extending.peaks import find_peaks
from kvq_attention.triton.extending.scratch import some_heads
from kvq_attention.triton.extending.step import Step
from kvq_attention.triton.side import Side
from kvq_attention.triton.tiles import power_of_two

JOINED = 16  # rows of a program that joins
TOKENS = 32  # of a program that decodes or places rows
SCALED_TOKENS = 256  # of one that reads scales alone

Found = tuple[torch.Tensor, torch.Tensor]  # means [heads, rows, dim] and natural logs of weights


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """One request and some of the KV heads.

    Attributes
    ----------
    step, k, v : of these heads alone
    num_pages : of the cache
    request : the request
    heads : how many
    """

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
    ) -> Heads:
        """Those heads of a step."""
        k, v = sides
        if len(heads) < step.kv_heads:
            k, v, step = some_heads(k, heads), some_heads(v, heads), step.heads(heads)
        return cls(step, k, v, num_pages, request, len(heads))

    @property
    def before(self) -> int:
        """Packed tokens that are placed before the own rows: the last of the past."""
        return portions.before(self.request.first_position)

    @property
    def own(self) -> tuple[torch.Tensor, ...]:
        """The own rows [queries, heads, dim]: q, k, v."""
        start, stop = self.request.start, self.request.stop
        return tuple(rows[start:stop] for rows in (self.step.q, self.step.k, self.step.v))

    @property
    def table_row(self) -> int:
        """Where the request's row of the page table begins, in items."""
        return self.request.index * self.step.table.stride(0)

    @property
    def constants(self) -> dict[str, Any]:
        """Of kernels that decode."""
        k, v = self.k, self.v
        return {
            **k.constants("K"),
            **v.constants("V"),
            "K_FACTOR": k.tile.factor,
            "V_FACTOR": v.tile.factor,
            "HEADS": self.heads,
            "PAGE": self.step.page_tokens,
            "TOKENS": TOKENS,
            "ASM": ptx_level(self.step.q.device),
        }

    @property
    def turns(self) -> torch.Tensor:
        """What rows are turned back by, or anything."""
        if self.k.tile.rotated or self.v.tile.rotated:
            return quaternions(self.step.q.device)
        return self.step.q

    def peaks(self) -> torch.Tensor:
        """What no magnitude exceeds [3, heads]: of all keys, all values, and queries."""
        peaks = self.step.q.new_zeros(3, self.heads, dtype=torch.float32)
        past, (q, k, v) = self.request.first_position, self.own
        scaled = self.k.tile.largest is not None and self.v.tile.largest is not None
        per_program = SCALED_TOKENS if scaled else TOKENS
        programs = max(-(-past // per_program), -(-self.request.queries // TOKENS))
        find_peaks[(programs, self.heads, 5)](
            self.k.tensors,
            self.v.tensors,
            q,
            k,
            v,
            peaks.view(torch.int32),
            self.step.table,
            self.turns,
            self.k.pages,
            self.v.pages,
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            self.table_row,
            self.num_pages,
            past,
            self.request.queries,
            **self.constants,
            K_LARGEST=self.k.tile.largest,
            V_LARGEST=self.v.tile.largest,
            GROUP=self.step.group,
            WIDTH=power_of_two(self.k.dim),
            PAST_TOKENS=per_program,
        )
        return peaks

    def placed(
        self, rows: int, dtype: torch.dtype, peaks: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """Own rows after what is before them, [heads, rows, dim] of a dtype: q, k, v."""
        q, k, v = self.own
        if peaks is None and self.before == 0 and rows == self.request.queries:
            return q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        counts, dim = (q.shape[1], self.heads, self.heads), self.k.dim
        target = q.new_empty(sum(counts), rows, dim, dtype=dtype)
        place[(-(-rows // TOKENS), sum(counts))](
            q,
            k,
            v,
            target,
            target if peaks is None else peaks,
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            self.before,
            self.request.queries,
            rows,
            DIM=dim,
            WIDTH=power_of_two(dim),
            HEADS=self.heads,
            GROUP=self.step.group,
            UNITS=peaks is not None,
            TOKENS=TOKENS,
        )
        past = self.request.first_position
        if self.before:
            packed = target[counts[0] :].view(2, self.heads, rows, dim)
            self._decode(past - self.before, past, packed, peaks)
        q, k, v = target.split(counts)
        return q, k, v

    def decoded(
        self, low: int, high: int, scratch: torch.Tensor, peaks: torch.Tensor | None
    ) -> torch.Tensor:
        """Tokens [low, high) of the past, K and V [2, heads, tokens, dim]."""
        shape = 2, self.heads, high - low, self.k.dim
        target = scratch[: 2 * self.heads * (high - low) * self.k.dim].view(shape)
        self._decode(low, high, target, peaks)
        return target

    def _decode(
        self, low: int, high: int, target: torch.Tensor, peaks: torch.Tensor | None
    ) -> None:
        dim = target.shape[3]
        gather[(-(-(high - low) // TOKENS), self.heads, 2)](
            self.k.tensors,
            self.v.tensors,
            target,
            target if peaks is None else peaks,
            self.step.table,
            self.turns,
            self.k.pages,
            self.v.pages,
            target.stride(0) // dim,
            target.stride(1) // dim,
            self.table_row,
            self.num_pages,
            low,
            high,
            **self.constants,
            UNITS=peaks is not None,
        )

    def kept(self, one: Found, two: Found) -> Found:
        """Both as one, in float32; in place from the second time on."""
        means, logs = one
        out = means
        if means.dtype != torch.float32:
            out = torch.empty_like(means, dtype=torch.float32)
        self._join(one, two, out, logs)
        return out, logs

    def finish(self, one: Found, two: Found | None, peaks: torch.Tensor | None) -> None:
        """Write the request's results, over one part or both."""
        out = self.step.out[self.request.start : self.request.stop].transpose(0, 1)
        self._join(one, two, out, None, self.before, self.step.scoring.sinks, peaks)

    def _join(
        self,
        one: Found,
        two: Found | None,
        out: torch.Tensor,
        kept: torch.Tensor | None,
        skipped: int = 0,
        sinks: torch.Tensor | None = None,
        peaks: torch.Tensor | None = None,
    ) -> None:
        heads, rows, dim = out.shape
        (means, logs), (more, more_logs) = one, two or one
        join[(-(-rows // JOINED), heads)](
            *(means, logs, more, more_logs, out),
            logs if kept is None else kept,
            logs if sinks is None else sinks,
            logs if peaks is None else peaks,
            *means.stride()[:2],
            *more.stride()[:2],
            *out.stride()[:2],
            logs.stride(0),
            more_logs.stride(0),
            skipped,
            rows,
            DIM=dim,
            WIDTH=power_of_two(dim),
            ROWS=JOINED,
            GROUP=self.step.group,
            TWO=two is not None,
            KEPT=kept is not None,
            SINKS=sinks is not None,
            UNITS=peaks is not None,
        )
