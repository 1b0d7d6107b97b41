"""Totals of the core, sent as StepStats at most every INTERVAL while they change."""

from collections.abc import Callable
from dataclasses import dataclass, field

from loraplane_engine.adapters.residency import Residency
from loraplane_engine.core.scheduler import Scheduler
from loraplane_engine.core.words import Batch
from loraplane_engine.memory.arena import BLOCK, Arena
from loraplane_engine.messages import StepStats

INTERVAL = 0.1
HISTOGRAM_BINS = 65


@dataclass(slots=True)
class Totals:
    steps: int = 0
    tokens: int = 0
    generated: int = 0
    lora_tokens: int = 0
    adapters_max: int = 0  # since the last report
    histogram: list[int] = field(default_factory=lambda: [0] * HISTOGRAM_BINS)
    by_adapter: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def count(self, batch: Batch, seconds: float) -> None:
        self.steps += 1
        self.seconds += seconds
        adapters = set()
        for chunk in batch.chunks:
            self.tokens += chunk.tokens
            adapter = chunk.sequence.adapter
            if adapter is not None:
                adapters.add(adapter.key)
                self.lora_tokens += chunk.tokens
                self.by_adapter[adapter.key.ref] = self.by_adapter.get(adapter.key.ref, 0) + chunk.tokens
        self.adapters_max = max(self.adapters_max, len(adapters))
        self.histogram[min(len(adapters), HISTOGRAM_BINS - 1)] += 1


class Reporter:
    def __init__(self, arena: Arena, residency: Residency, scheduler: Scheduler, *, clock: Callable[[], float]) -> None:
        self.totals = Totals()
        self._arena, self._residency, self._scheduler = arena, residency, scheduler
        self._clock = clock
        self._last: StepStats | None = None
        self._next = 0.0

    def due(self, *, now_at_latest: bool = False) -> StepStats | None:
        """The totals when they changed and INTERVAL has passed (or the core is about to wait)."""
        now = self._clock()
        if now < self._next and not now_at_latest:
            return None
        stats = self._stats()
        if stats == self._last:
            return None
        self._last, self._next = stats, now + INTERVAL
        self.totals.adapters_max = 0
        return stats

    def _stats(self) -> StepStats:
        totals, pages, page_bytes = self.totals, self._arena.pages, self._arena.page_bytes
        displaced = pages.used["adapter"] * BLOCK
        return StepStats(
            running=len(self._scheduler.running),
            waiting=self._scheduler.waiting.waiting,
            steps=totals.steps,
            tokens=totals.tokens,
            generated=totals.generated,
            lora_tokens=totals.lora_tokens,
            padded_tokens=0,  # segments are exact slices of the batch; a form that pads has to count here
            adapters_in_step_max=totals.adapters_max,
            adapters_in_step_histogram=list(totals.histogram),
            tokens_by_adapter=dict(totals.by_adapter),
            step_seconds=totals.seconds,
            swaps_in=self._residency.device.swaps_in,
            evictions=self._residency.device.evictions,
            pages_total=pages.total,
            pages_kv=pages.used["kv"],
            pages_adapters=pages.used["adapter"],
            page_tokens=BLOCK,
            adapter_budget_bytes=self._residency.limits.budget_pages * page_bytes,
            adapter_used_bytes=pages.used["adapter"] * page_bytes,
            adapter_reserved_bytes=self._residency.device_reserved,
            host_budget_bytes=self._residency.limits.host_bytes,
            host_used_bytes=self._residency.host_used,
            host_reserved_bytes=self._residency.host_reserved,
            kv_tokens_total=pages.total * BLOCK,
            kv_tokens_displaced=displaced,
            kv_tokens_free=pages.free * BLOCK,
        )
