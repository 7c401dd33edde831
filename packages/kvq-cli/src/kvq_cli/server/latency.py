"""How long clients wait, as histograms."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram

# Seconds. A small model on a GPU answers in milliseconds, a long prompt on a CPU takes minutes.
FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
NEXT_TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
WHOLE_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)


class Latency:
    """Measured in the server, from the submission of a request to the engine."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.first_token = Histogram(
            "kvq_time_to_first_token_seconds",
            "From submission to the first generated token, per choice.",
            buckets=FIRST_TOKEN_BUCKETS,
            registry=registry,
        )
        self.next_token = Histogram(
            "kvq_inter_token_latency_seconds",
            "From one generated token to the next, per token after the first.",
            buckets=NEXT_TOKEN_BUCKETS,
            registry=registry,
        )
        self.whole = Histogram(
            "kvq_e2e_request_latency_seconds",
            "From submission to the last token, per choice that finished.",
            buckets=WHOLE_BUCKETS,
            registry=registry,
        )

    @property
    def collectors(self) -> tuple[Histogram, ...]:
        """All of them."""
        return self.first_token, self.next_token, self.whole
