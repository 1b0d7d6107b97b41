"""How many replicas an adapter is spread over: raised at once with its demand, lowered with hysteresis."""

import math
from collections import OrderedDict
from collections.abc import Callable

HOLD_SECONDS = 30.0
KNOWN_MAX = 20_000


class Spread:
    def __init__(self, target_in_flight: int, clock: Callable[[], float]) -> None:
        self._target = target_in_flight
        self._clock = clock
        self._held: OrderedDict[str, tuple[int, float]] = OrderedDict()  # adapter -> (k, held until)

    def k(self, adapter: str, warm_replicas: int, concurrency: float) -> int:
        """`concurrency`: requests of the adapter in flight, this one counted. At least max(1, warm_replicas)."""
        floor = max(1, warm_replicas)
        needed = max(floor, math.ceil(concurrency / self._target))
        now = self._clock()
        held, until = self._held.get(adapter, (floor, now))
        if needed < held and now < until:
            return held
        if needed == floor:
            self._held.pop(adapter, None)
            return floor
        self._held[adapter] = (needed, now + HOLD_SECONDS)
        self._held.move_to_end(adapter)
        if len(self._held) > KNOWN_MAX:
            self._held.popitem(last=False)
        return needed
