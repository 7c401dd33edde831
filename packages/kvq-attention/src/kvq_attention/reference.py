"""The reference backend: plain torch on any device, for every codec.

Requests are attended to one after another, so a batch gives each the bits it gets alone. K and V
of one request and layer are decoded at a time and freed on return. Lengths, tables and slots are
read on the host, which synchronizes with a device.

Scores are float32 (float64 for float64 queries), inside torch.autocast too. What a query does not
see is left out of its sums, never multiplied by 0: a NaN or an infinity there never reaches it. (It
may be summed in blocks of another size then, and its last bits be rounded otherwise.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch

import kvq_codecs
from kvq_attention import launches
from kvq_attention.batch import Batch, Request
from kvq_attention.errors import SlotError
from kvq_attention.pages import copy_pages, movable, pages_by_head
from kvq_attention.scoring import Scoring
from kvq_codecs import Encoded

# Scores are made for blocks of query rows that fit into this; the smallest block is one row.
SCORE_BYTES = 64 << 20
# A block also scores positions that only its last rows see, so long ones waste work.
BLOCK_ROWS = 64

__all__ = ["copy_pages", "decode", "extend", "store", "unavailable"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _as_written(
    op: Callable[Concatenate[torch.Tensor, _P], _R],
) -> Callable[Concatenate[torch.Tensor, _P], _R]:
    """Run an op without gradients, and in the dtypes it names whatever autocast is in force."""

    @wraps(op)
    def run(first: torch.Tensor, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with torch.no_grad(), torch.autocast(first.device.type, enabled=False):
            return op(first, *args, **kwargs)

    return run


def unavailable(device: str) -> str | None:
    """None: it runs wherever torch does."""
    return None


@_as_written
def store(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: Encoded,
    v_cache: Encoded,
    slot_mapping: torch.Tensor,
) -> None:
    """Write the step's rows: see `kvq_attention.ops.store`."""
    if slot_mapping.numel() == 0:
        return
    launches.record("reference", "store")
    num_pages, _, page_tokens = k_cache.lead
    low, high = (int(edge) for edge in torch.aminmax(slot_mapping))
    if low < -1 or high >= num_pages * page_tokens:
        raise SlotError(
            f"slot_mapping holds {low} … {high}; slots lie in [0, {num_pages * page_tokens}), "
            f"{num_pages} pages of {page_tokens} tokens, and −1 means not stored"
        )
    if low < 0:
        kept = slot_mapping >= 0
        k, v, slot_mapping = k[kept], v[kept], slot_mapping[kept]
    page, offset = slot_mapping // page_tokens, slot_mapping % page_tokens
    # Both are encoded before either is written: a codec that fails leaves the cache as it was.
    encoded = [kvq_codecs.get(c.spec.name).encode(x) for x, c in ((k, k_cache), (v, v_cache))]
    for rows, cache in zip(encoded, (k_cache, v_cache), strict=True):
        for name, plane in cache.planes.items():
            movable(plane)[page, :, offset] = movable(rows.planes[name])


@_as_written
def decode(
    q: torch.Tensor,
    k_cache: Encoded,
    v_cache: Encoded,
    batch: Batch,
    tier: str,
    scoring: Scoring,
) -> torch.Tensor:
    """Attend over the cache alone: see `kvq_attention.ops.decode`."""
    launches.record("reference", "decode")
    stored = [
        _Stored.locate(batch, tier, request, scoring, request.length, k_cache.lead[0])
        for request in _live(batch)
    ]
    out = q.new_zeros(*q.shape[:2], v_cache.dim)
    for past in stored:
        rows = slice(past.request.start, past.request.stop)
        parts = (past.read(k_cache, v_cache, q),)
        # Row by row, so that a query's bits do not depend on how many are computed beside it.
        out[rows] = _attend(q[rows], parts, past.request, scoring, most_rows=1)
        del parts  # before the next request's are decoded
    return out


@_as_written
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
) -> torch.Tensor:
    """Attend over the step's own rows and the cache: see `kvq_attention.ops.extend`.

    A request's K and V are decoded at a time, whatever `scratch_bytes` is.
    """
    launches.record("reference", "extend")
    stored = [
        _Stored.locate(batch, tier, request, scoring, request.first_position, k_cache.lead[0])
        for request in _live(batch)
    ]
    out = q.new_zeros(*q.shape[:2], v_cache.dim)
    for past in stored:
        rows = slice(past.request.start, past.request.stop)
        own = _Rows.fresh(k[rows], v[rows], past.request.first_position, q)
        parts = past.read(k_cache, v_cache, q), own
        out[rows] = _attend(q[rows], parts, past.request, scoring)
        del parts  # before the next request's are decoded
    return out


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Keys [Hkv, S, D] and values [Hkv, S, Dv] at positions [start, start + S)."""

    start: int
    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def fresh(cls, k: torch.Tensor, v: torch.Tensor, start: int, q: torch.Tensor) -> _Rows:
        """Rows [S, Hkv, D] as the model made them."""
        dtype = _score_dtype(q)
        return cls(start, k.transpose(0, 1).to(dtype), v.transpose(0, 1).to(dtype))

    def between(self, low: int, high: int) -> _Rows:
        """Those at positions [low, high) that it has."""
        size = self.keys.shape[1]
        first = min(max(low - self.start, 0), size)
        part = slice(first, max(first, min(high - self.start, size)))
        return _Rows(self.start + first, self.keys[:, part], self.values[:, part])

    def all_finite(self) -> bool:
        """Whether no value is NaN or infinite (the keys do not matter: scores are selected)."""
        if self.values.numel() == 0:
            return True
        low, high = torch.aminmax(self.values)
        return bool(torch.isfinite(low) & torch.isfinite(high))


@dataclass(frozen=True, slots=True, eq=False)
class _Stored:
    """Positions [start, stop) of a request in the cache, and the pages that hold them."""

    request: Request
    start: int
    stop: int
    pages: torch.Tensor
    page_tokens: int

    @classmethod
    def locate(
        cls,
        batch: Batch,
        tier: str,
        request: Request,
        scoring: Scoring,
        stop: int,
        num_pages: int,
    ) -> _Stored:
        """What the request's queries see of the positions before `stop`."""
        start = min(scoring.first_visible(request.first_position), stop)
        pages = batch.pages(tier, request, start, stop, num_pages)
        return cls(request, start, stop, pages, batch.page_tokens)

    def read(self, k_cache: Encoded, v_cache: Encoded, q: torch.Tensor) -> _Rows:
        """Decode them, for scores with q."""
        return _Rows(self.start, self._decoded(k_cache, q), self._decoded(v_cache, q))

    def _decoded(self, cache: Encoded, q: torch.Tensor) -> torch.Tensor:
        packed = cache.map(lambda plane: pages_by_head(plane, self.pages))
        rows = kvq_codecs.get(cache.spec.name).decode(packed).flatten(1, 2)
        skipped = self.start % self.page_tokens
        kept: torch.Tensor = rows[:, skipped : skipped + self.stop - self.start]
        return kept.to(_score_dtype(q))


def _attend(
    q: torch.Tensor,
    parts: tuple[_Rows, ...],
    request: Request,
    scoring: Scoring,
    most_rows: int = BLOCK_ROWS,
) -> torch.Tensor:
    """One request: its queries [n, Hq, D] over adjoining parts → [n, Hq, Dv] in q's dtype."""
    count, heads, _ = q.shape
    out = q.new_empty(count, heads, parts[0].values.shape[-1])
    row_bytes = heads * sum(part.keys.shape[1] for part in parts) * _score_dtype(q).itemsize
    row_bytes *= len(parts)  # scores of several parts are copied to join them
    step = min(most_rows, max(1, SCORE_BYTES // row_bytes))
    if count > 1 and not all(part.all_finite() for part in parts):
        step = 1  # a row of its own sums over what it sees and nothing else
    for start in range(0, count, step):
        stop = min(start + step, count)
        low = scoring.first_visible(request.first_position + start)
        seen = [part.between(low, request.first_position + stop) for part in parts]
        seen = [part for part in seen if part.keys.shape[1]]
        out[start:stop] = _attend_block(
            q[start:stop], seen, request.first_position + start, scoring
        )
    return out


def _attend_block(
    q: torch.Tensor, parts: list[_Rows], position: int, scoring: Scoring
) -> torch.Tensor:
    """Queries [n, Hq, D] at position, position + 1, … over parts → [n, Hq, Dv]."""
    count, heads, dim = q.shape
    kv_heads = parts[0].keys.shape[0]
    group = heads // kv_heads
    # [n, Hq, D] → [Hkv, group · n, D]: one product per KV head serves its whole group
    grouped = q.to(_score_dtype(q)).reshape(count, kv_heads, group, dim).permute(1, 2, 0, 3)
    grouped = (grouped * scoring.scale).reshape(kv_heads, group * count, dim)

    products = [grouped @ part.keys.mT for part in parts]
    scores = products[0] if len(products) == 1 else torch.cat(products, dim=-1)
    del products
    if scoring.softcap is not None:
        scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
    if count > 1:
        hidden = _hidden(count, scores.shape[-1], parts[0].start, position, scoring, q.device)
        scores.view(kv_heads, group, count, -1).masked_fill_(hidden, -torch.inf)

    # Finite, so that scores of −∞ weigh 0 beside a sink; without one 0 / 0 is NaN, as it should be.
    top = scores.amax(dim=-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
    weights = scores.sub_(top).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    if scoring.sinks is not None:
        sinks = scoring.sinks.to(scores.dtype).reshape(kv_heads, group, 1)
        sinks = sinks.expand(-1, -1, count).reshape(kv_heads, group * count, 1)
        total += (sinks - top).exp_()  # may be infinite: then nothing is left for the values
    weights.div_(total)  # before the products: sums of large values could overflow
    out = q.new_zeros(kv_heads, group * count, parts[0].values.shape[-1], dtype=scores.dtype)
    column = 0
    for part in parts:
        size = part.keys.shape[1]
        out += weights.narrow(-1, column, size) @ part.values
        column += size
    return out.view(kv_heads, group, count, -1).permute(2, 0, 1, 3).flatten(1, 2)


def _hidden(
    count: int, size: int, start: int, position: int, scoring: Scoring, device: torch.device
) -> torch.Tensor:
    """Which of the positions start … start + size − 1 each of `count` queries does not see."""
    key = torch.arange(start, start + size, device=device)
    query = torch.arange(position, position + count, device=device)[:, None]
    hidden = key > query
    if scoring.window is not None:
        hidden |= key <= query - scoring.window
    return hidden


def _live(batch: Batch) -> list[Request]:
    """The requests that ask something; padded ones (length 0) see nothing and get 0."""
    return [r for r in batch.requests() if r.length > 0 and r.stop > r.start]


def _score_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32
