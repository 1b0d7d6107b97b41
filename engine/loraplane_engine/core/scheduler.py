"""Which positions the next step computes: continuous batching with chunked prefill, admission by bytes.

Rules:
- Running decodes come first, then running prefills, then admissions, within `max_batch_tokens` positions.
- KV blocks are taken as positions are computed. When none is free: idle adapters leave the device, then
  waiting requests lose the KV they kept, then the youngest running request is put back (its KV is computed
  again later). The oldest is never put back, and one request always fits beside the adapters' budget
  (max_model_len is cut to that at the start), so the running ones always finish.
- A queue whose adapter finds no place on the device is passed over; it holds up no other. When it has waited
  ROTATE_SECONDS, the adapter served longest makes room: its requests pause and keep their KV.
- A queue whose KV does not fit stops admission: what runs will end, and small requests cannot overtake for ever.
"""

from collections.abc import Callable
from enum import Enum

from loraplane_engine.adapters.residency import Residency
from loraplane_engine.adapters.words import Image
from loraplane_engine.core.fairness import FairQueues
from loraplane_engine.core.words import Batch, Chunk, QueueKey, Sequence
from loraplane_engine.memory.arena import Arena, blocks_for

ROTATE_SECONDS = 1.0


class Admission(Enum):
    ADMITTED = "admitted"
    NO_PLACE = "no place for the adapter"  # passes to the next queue
    NO_MEMORY = "no memory for the KV cache"  # ends admission for this step


class Scheduler:
    """Owns `waiting` and `running`. `on_admitted` hears of every admission."""

    def __init__(
        self,
        arena: Arena,
        residency: Residency,
        *,
        max_batch_tokens: int,
        max_sequences: int,
        on_admitted: Callable[[Sequence], None],
        clock: Callable[[], float],
    ) -> None:
        self.waiting = FairQueues()
        self.running: list[Sequence] = []  # in the order of admission
        self._arena, self._device = arena, residency.device
        self._max_batch_tokens, self._max_sequences = max_batch_tokens, max_sequences
        self._on_admitted, self._clock = on_admitted, clock
        self._admissions = 0
        self._chosen: dict[Sequence, int] = {}  # of the step being put together
        self._left = 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.enter(sequence)

    def bring_pinned(self) -> None:
        """Pinned images that found no place on the device get one in their turn, as queues do."""
        now = self._clock()
        for image, since in list(self._device.blocked.items()):
            if image.host is not None and now - since >= ROTATE_SECONDS and not self._rotate(image):
                self._device.blocked[image] = now

    def pins_due(self) -> list[float]:
        """When `bring_pinned` has something to do."""
        return [since + ROTATE_SECONDS for since in self._device.blocked.values()]

    def finish(self, sequence: Sequence) -> None:
        """The request is over, wherever it stands; all it held is free."""
        if sequence in self.running:
            self._stop(sequence)
        else:
            self.waiting.take(sequence)
        self._free_kv(sequence)
        self.waiting.leave(sequence.tenant)

    def schedule(self) -> Batch | None:
        """The next step, or None when nothing can run."""
        self._chosen, self._left = {}, self._max_batch_tokens
        for sequence in sorted(self.running, key=lambda sequence: sequence.remaining > 1):
            if self._left and sequence in self.running:  # it may have been put back for an older one
                self._choose(sequence)
        self._admit()
        if not self._chosen:
            return None
        chunks = [Chunk(sequence, sequence.computed, count) for sequence, count in self._chosen.items()]
        chunks.sort(key=lambda chunk: (_row(chunk.sequence), chunk.tokens))
        return Batch(chunks)

    def stuck(self) -> list[Sequence]:
        """Waiting requests that no waiting will help: nothing runs, all that could make room has, and still no."""
        if self.running:
            return []
        return [head for head in self.waiting.heads() if head.image is None or head.image.host is not None]

    def computed(self, chunk: Chunk) -> None:
        """The step that held `chunk` has been computed."""
        chunk.sequence.computed += chunk.tokens
        chunk.sequence.served += chunk.tokens
        if chunk.samples:
            self.waiting.charge(chunk.sequence.tenant, 1)

    # --- admission

    def _choose(self, sequence: Sequence) -> bool:
        """Take as much of the sequence into the step as fits; False when it was put back instead."""
        count = min(sequence.remaining, self._left)
        if not self._reserve(sequence, count):
            return False
        self._chosen[sequence] = count
        self._left -= count
        return True

    def _admit(self) -> None:
        passed_over: set[QueueKey] = set()
        while self.waiting.waiting and self._left and len(self.running) < self._max_sequences:
            head = next((head for head in self.waiting.heads() if head.queue not in passed_over), None)
            if head is None:
                return
            admission = self._try(head)
            if admission is Admission.NO_PLACE:
                passed_over.add(head.queue)
            elif admission is Admission.NO_MEMORY or not self._choose(head):
                return

    def _try(self, head: Sequence) -> Admission:
        image = head.image
        if image is not None and not self._bring(head, image):
            return Admission.NO_PLACE
        need = blocks_for(head.length + 1) - len(head.pages)
        while need > self._arena.pages.free and self._device.evict_one(keep=image):
            pass
        if need > self._arena.pages.free and self.running:
            return Admission.NO_MEMORY
        head.blocked_since = None
        self.waiting.take(head)
        self._admissions += 1
        head.admitted, head.admitted_at, head.served = self._admissions, self._clock(), 0
        if head.admissions == 0:
            self.waiting.charge(head.tenant, head.prompt_length)
        head.admissions += 1
        self.running.append(head)
        if image is not None:
            self._device.start(image, head.request)
        self._on_admitted(head)
        return Admission.ADMITTED

    def _bring(self, head: Sequence, image: Image) -> bool:
        if image.host is None:
            return False
        if self._device.bring(image):
            return True
        now = self._clock()
        if head.blocked_since is None:
            head.blocked_since = now
        if self.running and now - head.blocked_since < ROTATE_SECONDS:
            return False
        return self._rotate(image)

    def _rotate(self, image: Image) -> bool:
        """Make room for `image` from what has had its turn: pause adapters, or give up KV, as is short."""
        while not self._device.bring(image):
            made_room = self._pause_longest(image) if self._device.over_budget(image) else self._give_up_kv()
            if not made_room:
                return False
        return True

    def _pause_longest(self, image: Image) -> bool:
        """The adapter that was served most since it came in makes place."""
        served: dict[Image, int] = {}
        for sequence in self.running:
            other = sequence.image
            if other is None or other is image or other.pinned:
                continue
            if self._had_its_turn(other.running_since):
                served[other] = served.get(other, 0) + sequence.served
        if not served:
            return False
        longest = max(served, key=lambda other: served[other])
        for sequence in reversed([sequence for sequence in self.running if sequence.image is longest]):
            self._pause(sequence)  # each is put before those paused so far, so the oldest comes last
        return True

    def _give_up_kv(self) -> bool:
        if self._drop_waiting_kv():
            return True
        if not self.running or not self._had_its_turn(self.running[-1].admitted_at):
            return False
        self._put_back(self.running[-1])
        return True

    def _had_its_turn(self, since: float) -> bool:
        return self._clock() - since >= ROTATE_SECONDS

    # --- KV blocks

    def _reserve(self, sequence: Sequence, count: int) -> bool:
        """KV blocks for `count` more positions. False: the sequence itself was put back."""
        need = blocks_for(sequence.computed + count) - len(sequence.pages)
        if need <= 0:
            return True
        while (pages := self._arena.take_blocks(need)) is None:
            if self._device.evict_one() or self._drop_waiting_kv():
                continue
            victim = self.running[-1]
            self._put_back(victim)
            if victim is sequence:
                return False
        sequence.pages += pages
        return True

    def _drop_waiting_kv(self) -> bool:
        """Paused requests lose their KV, the one that was admitted last first."""
        holders = [sequence for sequence in self.waiting if sequence.pages]
        if not holders:
            return False
        self._free_kv(max(holders, key=lambda sequence: sequence.admitted))
        return True

    def _put_back(self, sequence: Sequence) -> None:
        self._pause(sequence)
        self._free_kv(sequence)

    def _pause(self, sequence: Sequence) -> None:
        """Out of the running set, KV kept."""
        self._stop(sequence)
        self.waiting.put_back(sequence)

    def _stop(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._left += self._chosen.pop(sequence, 0)
        if sequence.image is not None:
            self._device.stop(sequence.image, sequence.request)

    def _free_kv(self, sequence: Sequence) -> None:
        if sequence.pages:
            self._arena.free_blocks(sequence.pages)
            sequence.pages = []
        sequence.computed = 0


def _row(sequence: Sequence) -> int:
    return -1 if sequence.image is None or sequence.image.row is None else sequence.image.row
