"""A steady load as clients make it: the openai SDK without retries, streamed and whole answers, on connections that
are kept and on new ones. Requests begin by the clock, whatever becomes of the earlier ones.
"""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2
import openai

from tests.cluster.node.installation import POOL, POOL_NAMESPACE, TENANTS, Served
from tests.cluster.services import until

RATE = 3.0
TOKENS = 8
#: A stream that is still under way when something is done to it, and no longer when its drain, 20 s at least, is over.
LONG = 24
ANSWER_SECONDS = 60.0
BASE = "smollm2-135m-instruct"
#: What is asked for in turn: every tenant's adapter, and the base, which goes to whoever has least to do.
ASKED = [*TENANTS.items(), ("acme", BASE)]


@dataclass
class Answer:
    tenant: str
    model: str
    streamed: bool
    pooled: bool
    began: float = field(default_factory=time.monotonic)
    first_byte: float = 0.0  # as the client sees it; of a whole answer, all of it
    ended: float = 0.0
    replica: str = ""
    adapter_id: str = ""
    pieces: int = 0
    trouble: str = ""  # empty: a whole answer
    unsent: bool = False  # no connection came to be, so nothing was asked

    @property
    def under_way(self) -> bool:
        return self.first_byte > 0 and not self.ended


class Load:
    """Close it: what runs then is read to its end."""

    def __init__(self, served: Served, *, rate: float = RATE) -> None:
        self._rate = rate
        self._clients = {
            (tenant, pooled): served.client(tenant, pooled=pooled) for tenant in TENANTS for pooled in (True, False)
        }
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._pacer = threading.Thread(target=self._pace)
        self.answers: list[Answer] = []

    def start(self) -> None:
        self._pacer.start()

    def close(self) -> None:
        self._stop.set()
        self._pacer.join(timeout=5)
        for thread in self._threads:
            thread.join(timeout=2 * ANSWER_SECONDS)
        for client in self._clients.values():
            client.close()

    def failed(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.trouble]

    def running(self) -> list[Answer]:
        return [answer for answer in self.answers if not answer.ended]

    def done(self, since: float = 0.0) -> list[Answer]:
        """Whole answers to what was asked after that moment."""
        return [each for each in self.answers if each.ended and not each.trouble and each.began >= since]

    def until_answered(self, count: int, seconds: float = ANSWER_SECONDS) -> None:
        """So many more requests, begun from now on, have their answer."""
        since = time.monotonic()
        until(lambda: len(self.done(since)) >= count, seconds, lambda: f"{len(self.done(since))} of {count}: {self}")

    def stream_on(self, ordinal: int, seconds: float = ANSWER_SECONDS) -> Answer:
        """A long stream of the examples' pool that is under way on that replica."""
        replica = f"{POOL_NAMESPACE}/{POOL}/{ordinal}"
        deadline = time.monotonic() + seconds
        for tenant, model in itertools.cycle(ASKED):
            answer = self.ask(Answer(tenant, model, streamed=True, pooled=True), LONG)
            until(lambda a=answer: a.first_byte or a.ended, seconds, f"a first byte from {replica}: {self}", 0.01)  # type: ignore[misc]
            if answer.replica == replica and answer.under_way:
                return answer
            assert time.monotonic() < deadline, f"no stream came to {replica}: {self}"
        raise AssertionError("unreachable")

    def ask(self, answer: Answer, tokens: int = TOKENS) -> Answer:
        """Begins; the answer is filled in by a thread of its own."""
        self.answers.append(answer)
        thread = threading.Thread(target=self._run, args=(answer, tokens))
        self._threads.append(thread)
        thread.start()
        return answer

    def __str__(self) -> str:
        recent = self.answers[-12:]
        return f"{len(self.answers)} asked, {len(self.running())} run; failed: {self.failed()}; last: {recent}"

    # -- inside

    def _pace(self) -> None:
        began = time.monotonic()
        for number in itertools.count():
            if self._stop.wait(max(0.0, began + number / self._rate - time.monotonic())):
                return
            tenant, model = ASKED[number % len(ASKED)]
            turn = number // len(ASKED)  # so that every model gets every kind
            self.ask(Answer(tenant, model, streamed=turn % 2 == 0, pooled=turn % 4 < 2))

    def _run(self, answer: Answer, tokens: int) -> None:
        try:
            (self._stream if answer.streamed else self._whole)(answer, tokens)
        except (openai.OpenAIError, httpx2.HTTPError) as error:
            cause = error.__cause__
            answer.trouble = f"{type(error).__name__}: {error} ({type(cause).__name__}: {cause})"
            answer.unsent = isinstance(cause, httpx2.ConnectError | httpx2.ConnectTimeout)
        finally:
            answer.ended = time.monotonic()

    def _asked(self, answer: Answer, tokens: int) -> tuple[openai.OpenAI, dict[str, Any]]:
        fields = {"model": answer.model, "prompt": "Hello", "max_tokens": tokens, "temperature": 0}
        return self._clients[answer.tenant, answer.pooled], {**fields, "extra_body": {"ignore_eos": True}}

    def _whole(self, answer: Answer, tokens: int) -> None:
        client, fields = self._asked(answer, tokens)
        raw = client.completions.with_raw_response.create(**fields)
        _told_by(answer, raw.headers)
        answer.first_byte = time.monotonic()
        reason = raw.parse().choices[0].finish_reason
        answer.trouble = "" if reason == "length" else f"it ended with {reason}"

    def _stream(self, answer: Answer, tokens: int) -> None:
        client, fields = self._asked(answer, tokens)
        raw = client.completions.with_raw_response.create(stream=True, **fields)
        _told_by(answer, raw.headers)
        answer.first_byte = time.monotonic()  # the gateway sends headers with the first piece
        reason = ""
        for event in raw.parse():
            answer.pieces += 1
            reason = next((each.finish_reason for each in event.choices if each.finish_reason), reason)
        answer.trouble = "" if reason == "length" else f"it broke off: {reason or 'no end'}"


def _told_by(answer: Answer, headers: httpx2.Headers) -> None:
    answer.replica = headers.get("x-loraplane-replica", "")
    answer.adapter_id = headers.get("x-loraplane-adapter-id", "")


@contextlib.contextmanager
def steady(served: Served, **options: Any) -> Iterator[Load]:
    made = Load(served, **options)
    made.start()
    try:
        made.until_answered(2 * len(ASKED))
        yield made
    finally:
        made.close()


def eventually_serves(ask: Callable[[], str], prefix: str, seconds: float) -> str:
    """Until the adapter id that answers begins so; a change reaches the gateways a moment later."""
    return (
        until(lambda: (found := ask()).startswith(prefix) and found, seconds, lambda: f"{prefix}, not {ask()}", 0.2)
        or ""
    )
