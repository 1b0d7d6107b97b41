"""What the registry's /metrics shows. Labels are states and outcomes: few, and never a tenant's."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from loraplane_gateway.registry.ingestion.worker import Accepted, Failed, Outcome

STATES = ("unverified", "pending_base", "ingesting", "validated", "rejected")


class Metrics:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._versions = Gauge(
            "loraplane_registry_versions", "Adapter versions by state", ["state"], registry=self._registry
        )
        self._seconds = Histogram(
            "loraplane_registry_ingestion_seconds",
            "One ingestion in its worker",
            ["outcome"],
            buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15, 60, 120),
            registry=self._registry,
        )
        self._refused = Counter(
            "loraplane_registry_refusals",
            "Ingestions that ended without a version, by code",
            ["code"],
            registry=self._registry,
        )
        self.queue_errors = Counter(
            "loraplane_registry_ingestion_queue_errors",
            "Failures of the queue itself that are no outage of Postgres; the log has them",
            registry=self._registry,
        )
        self.feed_readers = Gauge("loraplane_registry_feed_readers", "Open change feeds", registry=self._registry)

    def ingestion(self, outcome: Outcome, seconds: float) -> None:
        if isinstance(outcome, Accepted):
            self._seconds.labels("validated").observe(seconds)
            return
        self._seconds.labels("failed" if isinstance(outcome, Failed) else "rejected").observe(seconds)
        self._refused.labels(outcome.code).inc()

    def render(self, counts: Mapping[str, int]) -> bytes:
        for state in STATES:
            self._versions.labels(state).set(counts.get(state, 0))
        return generate_latest(self._registry)
