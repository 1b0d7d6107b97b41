"""What the core says about adapters, for those who asked it something."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from loraplane_core.errors import LoraplaneError, from_wire
from loraplane_engine import messages as m
from loraplane_engine.adapters.image import IMAGE_BROKEN

#: Reasons of the core that pass by themselves, so that a client should try again.
_TEMPORARY = frozenset({"insufficient_memory", "unavailable", IMAGE_BROKEN, "engine_busy"})


class Words:
    """The core's words about one adapter from now on, in their order; none is lost between two `next`."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[m.AdapterState | m.AdapterFailed] = asyncio.Queue()

    async def next(self) -> m.AdapterState:
        """Raises what the core refused with. Requests that come and go make it speak, too: mind what it says."""
        word = await self._queue.get()
        if isinstance(word, m.AdapterFailed):
            raise _refusal(word)
        return word

    def put(self, word: m.AdapterState | m.AdapterFailed) -> None:
        self._queue.put_nowait(word)


class Answers:
    def __init__(self) -> None:
        self._asking: dict[m.AdapterKey, list[Words]] = {}

    @contextmanager
    def about(self, key: m.AdapterKey) -> Iterator[Words]:
        words = Words()
        self._asking.setdefault(key, []).append(words)
        try:
            yield words
        finally:
            self._asking[key].remove(words)
            if not self._asking[key]:
                del self._asking[key]

    def said(self, word: m.AdapterState | m.AdapterFailed) -> None:
        for words in self._asking.get(word.key, []):
            words.put(word)


def _refusal(word: m.AdapterFailed) -> LoraplaneError:
    status = 503 if word.code in _TEMPORARY else 422
    return from_wire(status, {"error": {"code": word.code, "message": word.message}})
