"""Server-sent events on their way through: only event borders and the usage chunk are looked at.

Whole events pass byte for byte; a torn tail is held back until its border arrives, so that an error
event can always follow. The parser decodes only events that mention usage.
"""

import re
from typing import Any

import msgspec

_BORDER = re.compile(rb"\r?\n\r?\n")
HOLD_MAX = 4 << 20
DONE = b"data: [DONE]"


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct, frozen=True):
    choices: list[msgspec.Raw] = []
    usage: Usage | None = None


class Answer(msgspec.Struct, frozen=True):
    """An unstreamed answer, as far as settling needs it."""

    usage: Usage | None = None


_CHUNKS = msgspec.json.Decoder(_Chunk)
_ANSWERS = msgspec.json.Decoder(Answer)


class EventScanner:
    def __init__(self, *, drop_usage: bool) -> None:
        self._drop_usage = drop_usage
        self._held = b""
        self.usage: Usage | None = None
        self.events = 0  # that reached the client, [DONE] not counted: an upper bound of the tokens it saw
        self.done = False

    def feed(self, chunk: bytes) -> bytes:
        """What may go to the client now."""
        self._held += chunk
        passed = []
        start = 0
        for border in _BORDER.finditer(self._held):
            event = self._held[start : border.end()]
            start = border.end()
            if self._passes(event):
                passed.append(event)
        self._held = self._held[start:]
        if len(self._held) > HOLD_MAX:
            passed.append(self._take())
        return b"".join(passed)

    def finish(self) -> bytes:
        """The rest, when the engine has ended the stream in order."""
        return self._take()

    def _take(self) -> bytes:
        held, self._held = self._held, b""
        return held

    def _passes(self, event: bytes) -> bool:
        if event.startswith(DONE):
            self.done = True
            return True
        if b'"usage"' in event and (chunk := _decode(event)) is not None and chunk.usage is not None:
            self.usage = chunk.usage
            if not chunk.choices:
                return not self._drop_usage
        self.events += event.startswith(b"data:")
        return True


def _decode(event: bytes) -> _Chunk | None:
    try:
        return _CHUNKS.decode(event.removeprefix(b"data:"))
    except msgspec.DecodeError:
        return None


def usage_of(body: bytes) -> Usage | None:
    """The usage in an unstreamed answer, if it has one."""
    try:
        return _ANSWERS.decode(body).usage
    except msgspec.DecodeError:
        return None


def error_event(error_object: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(error_object) + b"\n\n"
