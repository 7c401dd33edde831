"""GET /metrics: the engine's counters as Prometheus reads them.

What vLLM measures too has vLLM's name under our prefix.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from kvq_cli.engine.async_engine import AsyncEngine


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
        finished = CounterMetricFamily(
            "kvq_request_success", "Requests ended, by reason.", labels=["finished_reason"]
        )
        for reason in ("stop", "length", "abort"):
            finished.add_metric([reason], stats.requests_finished_total.get(reason, 0))
        yield finished
        pages = GaugeMetricFamily("kvq_pages", "Pages of the cache.", labels=["tier", "state"])
        for tier in stats.tiers:
            pages.add_metric([tier.name, "free"], tier.pages_free)
            pages.add_metric([tier.name, "cached"], tier.pages_cached)
            pages.add_metric([tier.name, "used"], tier.pages_used)
        yield pages
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
        yield GaugeMetricFamily(
            "kvq_cache_tokens", "Tokens that fit in the cache.", summary.num_tokens
        )
        yield GaugeMetricFamily(
            "kvq_cache_bytes_per_token",
            "Bytes of keys and values of one token in the tiers that grow.",
            summary.bytes_per_token,
        )


def routes(registry: CollectorRegistry) -> APIRouter:
    """The route, for one registry."""
    router = APIRouter(tags=["operation"])

    @router.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Counters, gauges and histograms in Prometheus' text format."""
        return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return router
