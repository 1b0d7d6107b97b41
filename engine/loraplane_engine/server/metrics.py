"""Prometheus metrics: what adapters cost, apart from how fast requests are (design §7).

Labels are tenant and adapter, the busiest ones plus `other`; never a version or a digest.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from loraplane_engine.messages import CoreReady, StepStats

PREFIX = "loraplane_engine_"
TOP_ADAPTERS = 20
_LATENCY = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_DISTINCT = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
_LOADS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """Counted by the server; what the core counts is read from its last StepStats at scrape time."""

    def __init__(self, stats: Callable[[], StepStats | None], ready: Callable[[], CoreReady | None]) -> None:
        self.registry = CollectorRegistry()
        self.time_to_first_token = Histogram(
            f"{PREFIX}time_to_first_token_seconds",
            "From a request's arrival to its first token, cold loads included",
            ["residency"],
            buckets=_LATENCY,
            registry=self.registry,
        )
        self.queue = Histogram(
            f"{PREFIX}queue_seconds", "Time in the core's queue", buckets=_LATENCY, registry=self.registry
        )
        self.loads = Histogram(
            f"{PREFIX}adapter_load_seconds",
            "Bringing an adapter to the host tier, by the tier it came from",
            ["tier"],
            buckets=_LOADS,
            registry=self.registry,
        )
        self.requests = Counter(
            f"{PREFIX}requests",
            "Requests by outcome: ok, disconnected, or the error's code",
            ["outcome"],
            registry=self.registry,
        )
        self.prompt_tokens = Counter(f"{PREFIX}prompt_tokens", "Prompt tokens accepted", registry=self.registry)
        self.completion_tokens = Counter(f"{PREFIX}completion_tokens", "Tokens answered", registry=self.registry)
        self._core = _CoreCollector(stats, ready)
        self.registry.register(self._core)

    def stepped(self, stats: StepStats) -> None:
        """The core's maximum is of one report; a scrape comes less often than reports."""
        self._core.most_adapters = max(self._core.most_adapters, stats.adapters_in_step_max)


class _CoreCollector(Collector):
    def __init__(self, stats: Callable[[], StepStats | None], ready: Callable[[], CoreReady | None]) -> None:
        self._stats = stats
        self._ready = ready
        self.most_adapters = 0

    def describe(self) -> list[Metric]:
        return []  # what it yields depends on the core; without this the registry would collect to find out

    def collect(self) -> Iterator[Metric]:
        ready = self._ready()
        if ready is not None:
            info = {"lora_form": ready.lora_form, "layout": ready.layout, "threads": str(ready.threads)}
            yield InfoMetricFamily(f"{PREFIX}core", "The grouped-LoRA form and memory layout in use", info)
        stats = self._stats()
        if stats is None:
            return
        for name, text, value in _gauges(stats):
            yield GaugeMetricFamily(PREFIX + name, text, value)
        yield GaugeMetricFamily(
            f"{PREFIX}adapters_per_step_max", "Most distinct adapters in one step since the start", self.most_adapters
        )
        for name, text, value in _counters(stats):
            yield CounterMetricFamily(PREFIX + name, text, value)
        yield _distinct_adapters(stats.adapters_in_step_histogram)
        yield _tokens_by_adapter(stats.tokens_by_adapter)


def _gauges(stats: StepStats) -> list[tuple[str, str, float]]:
    return [
        ("running_requests", "Requests in the batch", stats.running),
        ("waiting_requests", "Requests in the core's queue", stats.waiting),
        ("kv_tokens", "KV tokens that would fit with no adapter resident", stats.kv_tokens_total),
        ("kv_tokens_displaced", "KV tokens whose memory adapters take now", stats.kv_tokens_displaced),
        ("kv_tokens_free", "KV tokens that fit now", stats.kv_tokens_free),
        ("adapter_budget_bytes", "Device memory adapters may take", stats.adapter_budget_bytes),
        ("adapter_bytes", "Device memory adapters take", stats.adapter_used_bytes),
        ("adapter_reserved_bytes", "Device memory reserved by pinned adapters", stats.adapter_reserved_bytes),
        ("host_budget_bytes", "Host memory for engine images", stats.host_budget_bytes),
        ("host_bytes", "Host memory taken by engine images", stats.host_used_bytes),
        ("host_reserved_bytes", "Host memory reserved by warm and pinned adapters", stats.host_reserved_bytes),
        ("pages", "Pages of the device arena", stats.pages_total),
        ("pages_kv", "Pages holding KV cache", stats.pages_kv),
        ("pages_adapters", "Pages holding adapters", stats.pages_adapters),
    ]


def _counters(stats: StepStats) -> list[tuple[str, str, float]]:
    return [
        ("steps", "Steps computed", stats.steps),
        ("step_seconds", "Time spent in steps", stats.step_seconds),
        ("tokens", "Positions computed, prefill and decode", stats.tokens),
        ("generated_tokens", "Tokens sampled", stats.generated),
        ("lora_tokens", "Positions computed with an adapter", stats.lora_tokens),
        ("padded_tokens", "Positions computed for nobody; must stay 0", stats.padded_tokens),
        ("adapter_swaps", "Adapters copied to the device", stats.swaps_in),
        ("adapter_evictions", "Adapters evicted from the device", stats.evictions),
    ]


def _distinct_adapters(histogram: list[int]) -> Metric:
    last = len(histogram) - 1  # "or more"
    bounds = [bound for bound in _DISTINCT if bound < last]
    buckets = [(str(float(bound)), float(sum(histogram[: bound + 1]))) for bound in bounds]
    buckets.append(("+Inf", sum(histogram)))
    weighted = sum(adapters * steps for adapters, steps in enumerate(histogram))
    text = "Distinct adapters in a step"
    return HistogramMetricFamily(f"{PREFIX}adapters_per_step", text, buckets=buckets, sum_value=weighted)


def _tokens_by_adapter(tokens: dict[str, int]) -> Metric:
    """Versions of one adapter are one series; beyond the busiest, one series `other`."""
    family = CounterMetricFamily(
        f"{PREFIX}adapter_tokens", "Positions computed per adapter", labels=["tenant", "adapter"]
    )
    sums: dict[tuple[str, str], int] = defaultdict(int)
    for ref, count in tokens.items():
        tenant, _, rest = ref.partition("/")
        sums[tenant, rest.partition("@")[0]] += count
    ranked = sorted(sums.items(), key=lambda item: (-item[1], item[0]))
    for labels, count in ranked[:TOP_ADAPTERS]:
        family.add_metric(labels, count)
    if len(ranked) > TOP_ADAPTERS:
        family.add_metric(("other", "other"), sum(count for _, count in ranked[TOP_ADAPTERS:]))
    return family
