"""The one path from a checked request to text, streamed or not: core messages in, pieces out."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from loraplane_core.errors import DeadlineExceeded, EngineBusy, LoraplaneError, Withdrawn, from_wire
from loraplane_engine import messages as m
from loraplane_engine.server.core_client import CoreClient, RequestMessage
from loraplane_engine.server.protocol import Choice, GenerateRequest
from loraplane_engine.server.text import Detokenizer, StopStrings, Tokenizer

#: Longest silence of the core for one request; a queue that long helps nobody.
STALL_SECONDS = 300.0
#: Choices that may be with the core at once; more are refused instead of queued without bound.
MAX_IN_FLIGHT = 2048

_numbers = itertools.count()


@dataclass(frozen=True)
class Piece:
    """New text of one choice. The last piece of a choice carries `finish`."""

    index: int
    text: str
    logprobs: list[m.TokenLogprob] | None = None
    prompt_logprobs: list[m.TokenLogprob | None] | None = None
    finish: m.FinishReason | None = None


@dataclass(frozen=True)
class Started:
    queue_ms: float
    cold: bool


class _ChoiceText:
    """Turns one choice's tokens into pieces."""

    def __init__(self, choice: Choice, tokenizer: Tokenizer, stops: tuple[str, ...]) -> None:
        self._index = choice.index
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stops)
        self._min_tokens = choice.sampling.min_tokens
        self._prefix = choice.echo
        self.tokens = 0
        self.finished = False

    def accept(self, output: m.Output) -> Piece | None:
        """None when nothing can be shown yet."""
        text, self._prefix = self._prefix, ""
        used = 0
        stopped = False
        for token in output.tokens:
            used += 1
            new, stopped = self._push(self._detokenizer.push(token), self.tokens + used)
            text += new
            if stopped:
                break
        self.tokens += used
        finish = output.finish
        if output.finish and not stopped:
            new, stopped = self._push(self._detokenizer.flush(), self.tokens)
            text += new if stopped else new + self._stops.flush()
            # The token that ended it was computed too: usage counts it, as OpenAI does.
            self.tokens += output.stop_token is not None
        if stopped:
            finish = "stop"
        self.finished = finish is not None
        if not (text or finish or output.logprobs or output.prompt_logprobs):
            return None
        logprobs = output.logprobs[:used] if output.logprobs is not None else None
        return Piece(self._index, text, logprobs, output.prompt_logprobs, finish)

    def _push(self, text: str, tokens: int) -> tuple[str, bool]:
        if tokens < self._min_tokens:
            return text, False
        return self._stops.push(text)


class Generation:
    """All choices of one HTTP request. Whoever makes one must close it; closing aborts what still runs."""

    def __init__(self, core: CoreClient, tokenizer: Tokenizer, request: GenerateRequest) -> None:
        if core.in_flight + len(request.choices) > MAX_IN_FLIGHT:
            raise EngineBusy(f"{core.in_flight} requests are waiting; at most {MAX_IN_FLIGHT} may", retry_after=2)
        self._core = core
        self._request = request
        self._names = [f"{next(_numbers)}" for _ in request.choices]
        self._texts = [_ChoiceText(choice, tokenizer, request.stops) for choice in request.choices]
        self._inbox: asyncio.Queue[tuple[int, RequestMessage | LoraplaneError]] = asyncio.Queue()
        self._first_token: float | None = None

    @property
    def completion_tokens(self) -> int:
        return sum(text.tokens for text in self._texts)

    @property
    def first_token_at(self) -> float | None:
        """On time.perf_counter's clock; None before the first token."""
        return self._first_token

    async def start(self, adapter: m.AdapterKey | None, tenant: str, *, cold: bool) -> Started:
        """Hand everything to the core and wait until it computes. Raises what the core refuses with."""
        self._core.submit(
            (
                m.Generate(
                    request=name,
                    adapter=adapter,
                    tenant=tenant,
                    prompt=choice.prompt,
                    sampling=choice.sampling,
                    cold=cold,
                ),
                _Put(self._inbox, choice.index),
            )
            for name, choice in zip(self._names, self._request.choices, strict=True)
        )
        _, message = await self._next()
        if not isinstance(message, m.Scheduled):
            raise RuntimeError(f"the core sent {type(message).__name__} before Scheduled")
        return Started(message.queue_ms, message.cold or cold)

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """Pieces as they come, those that are there at once together. Ends when every choice has finished."""
        running = len(self._texts)
        while running:
            batch = [await self._next()]
            while not self._inbox.empty():
                batch.append(self._checked(self._inbox.get_nowait()))
            pieces = [piece for index, message in batch if (piece := self._accept(index, message)) is not None]
            running -= sum(piece.finish is not None for piece in pieces)
            if pieces:
                yield pieces

    def close(self) -> None:
        self._core.abort(self._names)

    def _accept(self, index: int, message: RequestMessage) -> Piece | None:
        text = self._texts[index]
        if not isinstance(message, m.Output) or text.finished:
            return None
        if self._first_token is None and message.tokens:
            self._first_token = time.perf_counter()
        piece = text.accept(message)
        if text.finished and message.finish is None:  # a stop string, which the core knows nothing of
            self._core.abort([self._names[index]])
        return piece

    async def _next(self) -> tuple[int, RequestMessage]:
        try:
            async with asyncio.timeout(STALL_SECONDS):
                return self._checked(await self._inbox.get())
        except TimeoutError as error:
            raise DeadlineExceeded(f"no progress for {STALL_SECONDS:.0f} seconds") from error

    def _checked(self, item: tuple[int, RequestMessage | LoraplaneError]) -> tuple[int, RequestMessage]:
        index, message = item
        if isinstance(message, LoraplaneError):
            raise message
        if isinstance(message, m.RequestFailed):
            raise from_wire(message.status, {"error": {"code": message.code, "message": message.message}})
        if isinstance(message, m.Output) and message.finish == "abort":
            # Nobody here asked for it: an unload went past its drain time.
            raise Withdrawn("the adapter was withdrawn while this request ran")
        return index, message


class _Put:
    def __init__(self, inbox: "asyncio.Queue[tuple[int, RequestMessage | LoraplaneError]]", index: int) -> None:
        self._inbox = inbox
        self._index = index

    def __call__(self, message: RequestMessage | LoraplaneError) -> None:
        self._inbox.put_nowait((self._index, message))
