"""What is asked of the cache over HTTP, and what is answered."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError

from kvq_cli.engine.params import CacheSize, EngineStats, EngineSummary, RebuildReport, TierStats
from kvq_cli.server.fields import Body, Text
from kvq_cli.server.protocol import Count
from kvq_pools import SnapshotStats


class RebuildRequest(Body):
    """Body of POST /v1/kv/rebuild; what is left out stays as it is."""

    num_tokens: Annotated[Count | None, Field(description="a multiple of page_tokens")] = None
    kv_cache_dtype: Annotated[
        Text | None,
        Field(
            description="CODEC or k=CODEC,v=CODEC, or layer by layer LAYERS:FORMAT,…: "
            "0-1:bf16,2-:k=q8_0,v=q4_0"
        ),
    ] = None

    @model_validator(mode="after")
    def _asks_for_something(self) -> RebuildRequest:
        if self.num_tokens is None and self.kv_cache_dtype is None:
            raise PydanticCustomError(
                "invalid_parameter",
                "or kv_cache_dtype must be given, or both",
                {"param": "num_tokens"},
            )
        return self


Attention = Annotated[
    dict[str, str], Field(description="store, decode, extend: the backend that computes each")
]


class Size(BaseModel):
    """The cache at one moment."""

    kv_cache_dtype: str
    num_tokens: int
    bytes: int
    bytes_per_token: float
    max_model_len: int
    attention: Attention

    @classmethod
    def of(cls, size: CacheSize) -> Size:
        """In the words of the API."""
        return cls(
            kv_cache_dtype=size.cache_dtype,
            num_tokens=size.num_tokens,
            bytes=size.nbytes,
            bytes_per_token=size.bytes_per_token,
            max_model_len=size.max_model_len,
            attention=size.attention,
        )


class Requests(BaseModel):
    """Running requests in a rebuild."""

    kept: int
    requeued: Annotated[int, Field(description="computed again, none is lost")]


class CachedPages(BaseModel):
    """Pages of the prefix cache in a rebuild, per tier."""

    kept: dict[str, int]
    dropped: dict[str, int]


class Rebuild(BaseModel):
    """A rebuild that was tried: answer of POST /v1/kv/rebuild when it succeeded."""

    before: Size
    after: Size
    requests: Requests
    cached_pages: CachedPages
    seconds: float
    finished_at: Annotated[float, Field(description="seconds since the epoch")]
    error: str | None

    @classmethod
    def of(cls, report: RebuildReport) -> Rebuild:
        """In the words of the API."""
        return cls(
            before=Size.of(report.before),
            after=Size.of(report.after),
            requests=Requests(kept=report.requests_kept, requeued=report.requests_requeued),
            cached_pages=CachedPages(kept=report.cached_kept, dropped=report.cached_dropped),
            seconds=report.seconds,
            finished_at=report.finished_at,
            error=report.error,
        )


class Pages(BaseModel):
    """Pages of one tier: free + cached + used = total."""

    total: int
    free: int
    cached: Annotated[int, Field(description="of the prefix cache, given up when needed")]
    used: Annotated[int, Field(description="of running requests")]


class StoredStatus(BaseModel):
    """What some layers store, and how."""

    name: Annotated[str, Field(description="k, v")]
    codec: str
    layers: list[int]
    bytes: Annotated[int, Field(description="of all pages and the padding page")]


class TierStatus(BaseModel):
    """One tier of the cache."""

    name: str
    window: Annotated[int | None, Field(description="positions a query sees; null: all")]
    page_bytes: int
    bytes: Annotated[int, Field(description="of all pages and the padding page")]
    pages: Pages
    stored: Annotated[list[StoredStatus], Field(description="every layer and its format")]

    @classmethod
    def of(cls, tier: TierStats) -> TierStatus:
        """In the words of the API."""
        return cls(
            name=tier.name,
            window=tier.window,
            page_bytes=tier.page_bytes,
            bytes=tier.nbytes,
            pages=Pages(
                total=tier.pages_total,
                free=tier.pages_free,
                cached=tier.pages_cached,
                used=tier.pages_used,
            ),
            stored=[
                StoredStatus(
                    name=each.name,
                    codec=each.codec,
                    layers=list(each.layers),
                    bytes=each.nbytes,
                )
                for each in tier.stored
            ],
        )


class PrefixStatus(BaseModel):
    """The prefix cache: totals since the server started."""

    enabled: bool
    lookups: Annotated[int, Field(description="requests that asked it")]
    queried_tokens: int
    hit_tokens: int
    evicted_pages: int


class StatesStatus(BaseModel):
    """States of linear-attention layers; counts are totals since the server started."""

    state_bytes: Annotated[int, Field(description="of one request, and of one snapshot")]
    running: Annotated[int, Field(description="requests that there is memory for")]
    snapshots: Annotated[int, Field(description="that there is memory for")]
    held: Annotated[int, Field(description="snapshots now, each with cached pages")]
    hits: Annotated[int, Field(description="requests that began with one")]
    evicted: Annotated[int, Field(description="given up for others")]
    missed_tokens: Annotated[
        int, Field(description="with cached pages, computed all the same for want of a snapshot")
    ]


class Load(BaseModel):
    """Requests now."""

    running: int
    waiting: int


class AttentionChecked(BaseModel):
    """What came of trying the kernels of the present cache before it served."""

    kernels: Annotated[int, Field(description="that agree with the formats' definition")]
    seconds: float
    fallbacks: Annotated[
        list[str],
        Field(description="who stands in for a backend that failed, and how it failed"),
    ]


class Status(BaseModel):
    """Answer of GET /v1/kv/status."""

    state: Literal["ready", "rebuilding", "failed"]
    failure: str | None
    model: str
    kv_cache_dtype: str
    attention: Attention
    attention_check: AttentionChecked | None
    extend_routes: Annotated[
        dict[str, int],
        Field(
            description="launches of extend since the start, by how cached tokens are read; those "
            "in a CUDA graph count as it is made, not as it is replayed"
        ),
    ]
    weights: Annotated[str, Field(description="their type and where they are")]
    prefill_reads: Annotated[
        str,
        Field(description="own or packed: what a prompt's tokens see of those of the same step"),
    ]
    page_tokens: int
    num_tokens: int
    max_model_len: int
    bytes: Annotated[int, Field(description="of the whole pool")]
    bytes_per_token: Annotated[float, Field(description="in the tiers that grow")]
    bf16_bytes_per_token: float
    tiers: list[TierStatus]
    prefix_cache: PrefixStatus
    states: Annotated[
        StatesStatus | None, Field(description="null: the model has no linear-attention layers")
    ]
    requests: Load
    last_rebuild: Rebuild | None

    @classmethod
    def of(
        cls,
        state: Literal["ready", "rebuilding", "failed"],
        failure: str | None,
        summary: EngineSummary,
        stats: EngineStats,
    ) -> Status:
        """In the words of the API."""
        prefix, last, check = stats.prefix, stats.last_rebuild, summary.attention_check
        return cls(
            state=state,
            failure=failure,
            model=summary.model_name,
            kv_cache_dtype=summary.cache_dtype,
            attention=summary.attention,
            attention_check=None if check is None else AttentionChecked(**asdict(check)),
            extend_routes=stats.extend_routes,
            weights=summary.weights,
            prefill_reads=summary.prefill_reads,
            page_tokens=summary.page_tokens,
            num_tokens=summary.num_tokens,
            max_model_len=summary.max_model_len,
            bytes=summary.cache_bytes,
            bytes_per_token=summary.bytes_per_token,
            bf16_bytes_per_token=summary.bf16_bytes_per_token,
            tiers=[TierStatus.of(tier) for tier in stats.tiers],
            prefix_cache=PrefixStatus(
                enabled=summary.prefix_cache,
                lookups=prefix.lookups,
                queried_tokens=prefix.queried_tokens,
                hit_tokens=prefix.hit_tokens,
                evicted_pages=prefix.evicted_pages,
            ),
            states=_states(summary, stats.snapshots),
            requests=Load(running=stats.running, waiting=stats.waiting),
            last_rebuild=None if last is None else Rebuild.of(last),
        )


def _states(summary: EngineSummary, found: SnapshotStats) -> StatesStatus | None:
    if not summary.states:
        return None
    return StatesStatus(
        state_bytes=summary.state_bytes,
        running=summary.states,
        snapshots=summary.snapshots,
        held=found.held,
        hits=found.hits,
        evicted=found.evicted,
        missed_tokens=found.missed_tokens,
    )
