"""Prometheus metrics of the data gateway. Labels are tenant and adapter, bounded; never version or digest."""

import time
from collections import OrderedDict
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

TOP = 200
IDLE_SECONDS = 600.0
OTHER = ("other", "other")
RESIDENCIES = ("hit", "cold")
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class TopLabels:
    """At most TOP (tenant, adapter) pairs have series of their own; one idle for long makes room for another."""

    def __init__(self, forget: Callable[[tuple[str, str]], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._forget = forget
        self._clock = clock
        self._used: OrderedDict[tuple[str, str], float] = OrderedDict()

    def of(self, tenant: str, adapter: str) -> tuple[str, str]:
        pair = (tenant, adapter)
        now = self._clock()
        if pair not in self._used and len(self._used) >= TOP:
            oldest, used_at = next(iter(self._used.items()))
            if now - used_at < IDLE_SECONDS:
                return OTHER
            del self._used[oldest]
            self._forget(oldest)
        self._used[pair] = now
        self._used.move_to_end(pair)
        return pair


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ("tenant", "adapter")
        self._requests = Counter(
            "loraplane_gateway_requests", "Requests that reached routing", (*labels, "status"), registry=self.registry
        )
        self._first_byte = Histogram(
            "loraplane_gateway_first_byte_seconds",
            "From the request's arrival to the first byte of its answer",
            labels,
            registry=self.registry,
            buckets=_SECONDS,
        )
        self._answers = Counter(
            "loraplane_gateway_answers",
            "Answers by where the engine found the adapter: hit, or cold",
            (*labels, "residency"),
            registry=self.registry,
        )
        self._tokens = Counter("loraplane_gateway_tokens", "Tokens settled", (*labels, "kind"), registry=self.registry)
        self.refused = Counter(
            "loraplane_gateway_refused", "Requests refused before routing", ("code",), registry=self.registry
        )
        self.retries = Counter(
            "loraplane_gateway_retries", "Further replicas tried", ("reason",), registry=self.registry
        )
        self.disconnects = Counter("loraplane_gateway_disconnects", "Clients that left", registry=self.registry)
        self.broken_streams = Counter(
            "loraplane_gateway_broken_streams", "Answers that failed after their first byte", registry=self.registry
        )
        self.usage_dropped = Counter(
            "loraplane_gateway_usage_dropped", "Usage events lost to a full queue", registry=self.registry
        )
        self._labels = TopLabels(self._forget)
        self._seen_status: dict[tuple[str, str], set[str]] = {}

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        Gauge(f"loraplane_gateway_{name}", text, registry=self.registry).set_function(read)

    def served(self, tenant: str, adapter: str, status: int, first_byte: float | None, residency: str = "") -> None:
        pair = self._labels.of(tenant, adapter)
        self._seen_status.setdefault(pair, set()).add(str(status))
        self._requests.labels(*pair, str(status)).inc()
        if first_byte is not None:
            self._first_byte.labels(*pair).observe(first_byte)
            if residency in RESIDENCIES:
                self._answers.labels(*pair, residency).inc()

    def settled(self, tenant: str, adapter: str, prompt: int, completion: int) -> None:
        pair = self._labels.of(tenant, adapter)
        self._tokens.labels(*pair, "prompt").inc(prompt)
        self._tokens.labels(*pair, "completion").inc(completion)

    def _forget(self, pair: tuple[str, str]) -> None:
        for status in self._seen_status.pop(pair, ()):
            self._requests.remove(*pair, status)
        self._first_byte.remove(*pair)
        for residency in RESIDENCIES:
            self._answers.remove(*pair, residency)
        for kind in ("prompt", "completion"):
            self._tokens.remove(*pair, kind)
