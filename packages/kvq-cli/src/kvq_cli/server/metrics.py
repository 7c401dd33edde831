"""GET /metrics: the engine's counters as Prometheus reads them.

What vLLM measures too has vLLM's name under our prefix, and a second time under vLLM's own, so that
dashboards made for it show it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, get_args

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvq_cli.engine.params import FinishReason

if TYPE_CHECKING:
    from kvq_cli.engine.async_engine import AsyncEngine
    from kvq_cli.engine.params import EngineStats, EngineSummary


# Under these names kvq and vLLM count the same thing.
SHARED = (
    "num_requests_running",
    "num_requests_waiting",
    "num_preemptions",
    "prompt_tokens",
    "generation_tokens",
    "request_success",
    "kv_cache_usage_perc",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
)
OURS, THEIRS = "kvq_", "vllm:"


class EngineCollector(Collector):
    """Reads the engine when it is asked, so that nothing is counted twice."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """One snapshot as metrics."""
        summary, stats = self._engine.snapshot
        yield GaugeMetricFamily(
            "kvq_num_requests_running", "Requests being computed.", stats.running
        )
        yield GaugeMetricFamily(
            "kvq_num_requests_waiting", "Requests waiting for pages or a place.", stats.waiting
        )
        yield CounterMetricFamily(
            "kvq_prompt_tokens", "Prompt tokens accepted.", stats.prompt_tokens_total
        )
        yield CounterMetricFamily(
            "kvq_generation_tokens", "Tokens generated.", stats.generation_tokens_total
        )
        yield CounterMetricFamily("kvq_steps", "Steps computed.", stats.steps_total)
        yield CounterMetricFamily(
            "kvq_num_preemptions",
            "Times that a request gave its pages back, to be computed again later.",
            stats.preemptions_total,
        )
        finished = CounterMetricFamily(
            "kvq_request_success", "Requests ended, by reason.", labels=["finished_reason"]
        )
        for reason in get_args(FinishReason):
            finished.add_metric([reason], stats.requests_finished_total.get(reason, 0))
        yield finished
        pages = GaugeMetricFamily("kvq_pages", "Pages of the cache.", labels=["tier", "state"])
        for tier in stats.tiers:
            pages.add_metric([tier.name, "free"], tier.pages_free)
            pages.add_metric([tier.name, "cached"], tier.pages_cached)
            pages.add_metric([tier.name, "used"], tier.pages_used)
        yield pages
        yield GaugeMetricFamily(
            "kvq_kv_cache_usage_perc",
            "Share of the pages that requests use, in the tier where it is the largest; 1 is all.",
            max((tier.pages_used / tier.pages_total for tier in stats.tiers), default=0.0),
        )
        nbytes = GaugeMetricFamily("kvq_cache_bytes", "Bytes of the cache.", labels=["tier"])
        for tier in stats.tiers:
            nbytes.add_metric([tier.name], tier.nbytes)
        yield nbytes
        yield CounterMetricFamily(
            "kvq_prefix_cache_evicted_pages",
            "Pages of the prefix cache that were given up for others.",
            stats.prefix.evicted_pages,
        )
        yield CounterMetricFamily(
            "kvq_prefix_cache_queries",
            "Tokens looked up in the prefix cache.",
            stats.prefix.queried_tokens,
        )
        yield CounterMetricFamily(
            "kvq_prefix_cache_hits",
            "Tokens found in the prefix cache and not computed.",
            stats.prefix.hit_tokens,
        )
        if summary.states:
            yield from self._states(summary, stats)
        yield GaugeMetricFamily(
            "kvq_cache_tokens", "Tokens that fit in the cache.", summary.num_tokens
        )
        yield GaugeMetricFamily(
            "kvq_cache_bytes_per_token",
            "Bytes of keys and values of one token in the tiers that grow.",
            summary.bytes_per_token,
        )
        yield GaugeMetricFamily(
            "kvq_cache_bf16_bytes_per_token",
            "What the same token would take as bf16.",
            summary.bf16_bytes_per_token,
        )
        info = {"kv_cache_dtype": summary.cache_dtype, "model_name": summary.model_name}
        cache = GaugeMetricFamily("kvq_cache_info", "How the cache is stored.", labels=[*info])
        cache.add_metric([*info.values()], 1)
        yield cache

    def _states(self, summary: EngineSummary, stats: EngineStats) -> Iterator[Metric]:
        """Of linear-attention layers."""
        snapshots = stats.snapshots
        nbytes = GaugeMetricFamily(
            "kvq_state_bytes", "Bytes of linear-attention states.", labels=["kind"]
        )
        nbytes.add_metric(["running"], summary.states * summary.state_bytes)
        nbytes.add_metric(["snapshots"], summary.snapshots * summary.state_bytes)
        yield nbytes
        places = GaugeMetricFamily(
            "kvq_state_snapshots", "Places of snapshots of states.", labels=["state"]
        )
        places.add_metric(["held"], snapshots.held)
        places.add_metric(["free"], snapshots.places - snapshots.held)
        yield places
        yield CounterMetricFamily(
            "kvq_state_snapshot_hits", "Requests that began with a snapshot.", snapshots.hits
        )
        yield CounterMetricFamily(
            "kvq_state_snapshots_evicted",
            "Snapshots that were given up for others.",
            snapshots.evicted,
        )
        yield CounterMetricFamily(
            "kvq_state_snapshot_missed_tokens",
            "Tokens found in the prefix cache and computed all the same for want of a snapshot.",
            snapshots.missed_tokens,
        )


class VllmNames(Collector):
    """What other collectors have that vLLM counts too, named as vLLM names it."""

    def __init__(self, model_name: str, sources: Sequence[Collector]) -> None:
        self._labels = {"model_name": model_name, "engine": "0"}
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        """The same samples under other names."""
        for source in self._sources:
            for metric in source.collect():
                name = metric.name.removeprefix(OURS)
                if name not in SHARED:
                    continue
                theirs = Metric(THEIRS + name, metric.documentation, metric.type)
                theirs.samples = [
                    sample._replace(
                        name=THEIRS + sample.name.removeprefix(OURS),
                        labels=self._labels | sample.labels,
                    )
                    for sample in metric.samples
                    if not sample.name.endswith("_created")
                ]
                yield theirs


def routes(registry: CollectorRegistry) -> APIRouter:
    """The route, for one registry."""
    router = APIRouter(tags=["operation"])

    @router.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Counters, gauges and histograms in Prometheus' text format."""
        return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return router
