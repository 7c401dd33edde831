"""What the launches of an extend share: tensors, sizes, and the launch of its kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from kvq_attention.batch import Batch
from kvq_attention.rotation import quaternions
from kvq_attention.scoring import Scoring
from kvq_attention.triton.compat import ptx_level
from kvq_attention.triton.decode import WIDEST, request_slots, shared_memory
from kvq_attention.triton.extending import shapes
from kvq_attention.triton.extending.kernel import attend_new
from kvq_attention.triton.side import Side, product_dtype
from kvq_attention.triton.softmax import LOG2_E


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """The tensors of a call, as kernels take them.

    Attributes
    ----------
    q, k, v, out : rows of the step, each row's values next to each other
    query_offsets, seq_lens, table : of the batch, contiguous
    page_tokens : tokens a page
    scoring : its sinks contiguous
    shape : of the launch
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    query_offsets: torch.Tensor
    seq_lens: torch.Tensor
    table: torch.Tensor
    page_tokens: int
    scoring: Scoring
    shape: shapes.Shape

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sides: tuple[Side, Side],
        batch: Batch,
        tier: str,
        scoring: Scoring,
    ) -> Step:
        """The step of a call over a cache of these sides."""
        table = batch.table(tier).page_table
        sinks = scoring.sinks
        dtypes = [product_dtype(k.dtype, q.dtype), product_dtype(v.dtype, q.dtype)]
        dtypes += [side.dtype for side in sides]
        return cls(
            *(_in_line(q), _in_line(k), _in_line(v)),
            q.new_empty(*q.shape[:2], sides[1].dim),
            batch.query_offsets.contiguous(),
            batch.seq_lens.contiguous(),
            table if table.stride(1) == 1 else table.contiguous(),
            batch.page_tokens,
            replace(scoring, sinks=None if sinks is None else sinks.resolve_neg().contiguous()),
            shapes.pick(
                max(side.columns * side.tile.split for side in sides),
                max(dtype.primitive_bitwidth // 8 for dtype in dtypes),
                shared_bytes=shared_memory(q.device),
            ),
        )

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.q.shape[0]

    @property
    def num_requests(self) -> int:
        """R."""
        return self.seq_lens.shape[0]

    @property
    def kv_heads(self) -> int:
        """Hkv."""
        return self.k.shape[1]

    @property
    def group(self) -> int:
        """Query heads a KV head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def reach(self) -> int:
        """Tokens that the page table has columns for."""
        return min(self.table.shape[1] * self.page_tokens, WIDEST)

    @property
    def window(self) -> int | None:
        """The scoring's, as int32."""
        window = self.scoring.window
        return None if window is None else min(window, WIDEST)

    @property
    def visible(self) -> int:
        """Tokens of a past that are looked at, at most, whole tiles from the first."""
        if self.window is None:
            return self.reach
        return min(self.reach, self.window + self.num_tokens + self.shape.tokens)

    @property
    def common(self) -> dict[str, Any]:
        """Constants of every kernel."""
        return {
            "GROUP": self.group,
            "ROWS": self.shape.rows,
            "TOKENS": self.shape.tokens,
            "REQUESTS": request_slots(self.num_requests),
            "WINDOW": self.window is not None,
        }

    def requests(self, first: int, start: int, count: int, stop: int) -> Step:
        """The same for `count` requests from the first on, whose rows are [start, stop)."""
        rows, some = slice(start, stop), slice(first, first + count)
        # Copies of what is small: kernels are compiled anew for pointers of another alignment.
        return replace(
            self,
            q=self.q[rows],
            out=self.out[rows],
            k=self.k[rows],
            v=self.v[rows],
            query_offsets=self.query_offsets[first : first + count + 1] - start,
            seq_lens=self.seq_lens[some].clone(),
            table=self.table[some].clone(),
        )

    def heads(self, heads: range) -> Step:
        """The same for some of the KV heads and the query heads that read them."""
        if len(heads) == self.kv_heads:
            return self
        own = slice(heads.start, heads.stop)
        asking = slice(heads.start * self.group, heads.stop * self.group)
        sinks = self.scoring.sinks
        return replace(
            self,
            q=self.q[:, asking],
            out=self.out[:, asking],
            k=self.k[:, own],
            v=self.v[:, own],
            scoring=replace(self.scoring, sinks=None if sinks is None else sinks[asking]),
        )


def attend(
    step: Step,
    past_k: Side,
    past_v: Side,
    items: int,
    kept: torch.Tensor,
    kept_weights: torch.Tensor,
    *,
    num_pages: int = 0,
    capacity: int = 0,
    low: int = 0,
    share: int = 0,
    fewest: int = 0,
    most: int = 0,
    least_part: int = 0,
    dense: tuple[bool, bool] = (False, False),
    resumed: bool = False,
    keep: bool = False,
) -> None:
    """Launch the kernel for up to so many items of a KV head: see `attend_new`."""
    scoring, device = step.scoring, step.q.device
    base = 1.0 if scoring.softcap else LOG2_E.value
    nothing = kept_weights
    attend_new[(max(1, items), step.kv_heads)](
        step.q,
        step.k,
        step.v,
        past_k.tensors,
        past_v.tensors,
        step.query_offsets,
        step.seq_lens,
        step.table,
        step.out,
        kept,
        kept_weights,
        nothing if scoring.sinks is None else scoring.sinks,
        quaternions(device) if past_k.tile.rotated or past_v.tile.rotated else nothing,
        *step.out.stride()[:2],
        past_k.pages,
        past_v.pages,
        *step.q.stride()[:2],
        *step.k.stride()[:2],
        *step.v.stride()[:2],
        step.table.stride(0),
        num_pages,
        step.num_requests,
        step.num_tokens,
        capacity,
        step.reach,
        low,
        share,
        step.window or 0,
        scoring.scale * past_k.tile.factor * base,
        scoring.scale * base,
        scoring.softcap or 0.0,
        **past_k.constants("K"),
        **past_v.constants("V"),
        **step.common,
        V_FACTOR=past_v.tile.factor,
        OWN_K_DTYPE=product_dtype(step.k.dtype, step.q.dtype),
        OWN_V_DTYPE=product_dtype(step.v.dtype, step.q.dtype),
        KV_HEADS=step.kv_heads,
        PAGE=step.page_tokens,
        FEWEST=fewest,
        MOST=most,
        LEAST_PART=least_part,
        K_DENSE=dense[0],
        V_DENSE=dense[1],
        RESUMED=resumed,
        KEPT=keep,
        SOFTCAP=scoring.softcap is not None,
        SINKS=scoring.sinks is not None,
        STAGES=step.shape.stages,
        ASM=ptx_level(device),
        num_warps=step.shape.warps,
    )


def _in_line(rows: torch.Tensor) -> torch.Tensor:
    """The same rows, their values next to each other."""
    rows = rows.resolve_neg()
    return rows if rows.stride(2) == 1 else rows.contiguous()
