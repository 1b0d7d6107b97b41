"""A steady load as clients make it: the openai SDK without retries, streamed and whole answers, on connections that
are kept and on new ones. Requests begin by the clock, whatever becomes of the earlier ones.
"""

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2
import openai

from tests.cluster.node.installation import POOL, POOL_NAMESPACE, TENANTS, Served
from tests.cluster.services import until

RATE = 3.0
TOKENS = 8
#: An answer that takes a second at least.
LONG = 48
#: More than anybody waits for: such a stream flows until its client leaves it, however fast the machine is.
ENDLESS = 1900
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
    at: str = ""  # one gateway's address; empty: the Service's
    endless: bool = False
    began: float = field(default_factory=time.monotonic)
    first_byte: float = 0.0  # as the client sees it; of a whole answer, all of it
    latest: float = 0.0  # piece of a stream
    ended: float = 0.0
    replica: str = ""
    adapter_id: str = ""
    residency: str = ""
    pieces: int = 0
    trouble: str = ""  # empty: a whole answer
    unsent: bool = False  # no connection came to be, so nothing was asked
    left: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)

    @property
    def under_way(self) -> bool:
        return self.first_byte > 0 and not self.ended

    def flows_until(self, moment: float) -> None:
        """Pieces still come then (of `time.monotonic`)."""
        seconds = moment - time.monotonic() + ANSWER_SECONDS
        until(lambda: self.ended or self.latest >= moment, seconds, lambda: f"it stands still: {self}")
        assert not self.ended, f"it ended {moment - self.ended:.1f} s too early: {self}"

    def leave(self) -> None:
        """Its client has seen enough, and goes with the next piece."""
        self.left.set()


class Load:
    """Close it: what runs then is read to its end, and what has none is left."""

    def __init__(self, served: Served, *, rate: float = RATE, asked: Sequence[tuple[str, str]] = ASKED) -> None:
        self._served = served
        self._rate = rate
        self._asked = list(asked)
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
        for answer in self.answers:
            if answer.endless:
                answer.leave()
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

    def flow(self, ordinal: int | None = None, *, at: str = "", seconds: float = ANSWER_SECONDS) -> Answer:
        """An endless stream that is under way: on that replica of the examples' pool, by that gateway."""
        replica = "" if ordinal is None else f"{POOL_NAMESPACE}/{POOL}/{ordinal}"
        deadline = time.monotonic() + seconds
        for tenant, model in itertools.cycle(self._asked):
            answer = self.ask(Answer(tenant, model, streamed=True, pooled=not at, at=at, endless=True))
            until(lambda a=answer: a.first_byte or a.ended, seconds, lambda: f"no first byte: {self}", 0.01)  # type: ignore[misc]
            if answer.under_way and answer.replica.startswith(replica):
                return answer
            answer.leave()
            assert time.monotonic() < deadline, f"no stream came to {replica or at}: {self}"
        raise AssertionError("unreachable")

    def ask(self, answer: Answer, tokens: int = TOKENS) -> Answer:
        """Begins; the answer is filled in by a thread of its own."""
        self.answers.append(answer)
        thread = threading.Thread(target=self._run, args=(answer, ENDLESS if answer.endless else tokens))
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
            tenant, model = self._asked[number % len(self._asked)]
            turn = number // len(self._asked)  # so that every model gets every kind
            self.ask(Answer(tenant, model, streamed=turn % 2 == 0, pooled=turn % 4 < 2))

    def _run(self, answer: Answer, tokens: int) -> None:
        ask = self._stream if answer.streamed else self._whole
        fields = {"model": answer.model, "prompt": "Hello", "max_tokens": tokens, "temperature": 0}
        try:
            with self._client(answer) as client:
                reason = ask(client, answer, {**fields, "extra_body": {"ignore_eos": True}})
            answer.trouble = "" if answer.left.is_set() else _judged(answer, reason)
        except (openai.OpenAIError, httpx2.HTTPError) as error:
            cause = error.__cause__
            answer.trouble = f"{type(error).__name__}: {error} ({type(cause).__name__}: {cause})"
            answer.unsent = isinstance(cause, httpx2.ConnectError | httpx2.ConnectTimeout)
        finally:
            answer.ended = time.monotonic()

    @contextlib.contextmanager
    def _client(self, answer: Answer) -> Iterator[openai.OpenAI]:
        if not answer.at:
            yield self._clients[answer.tenant, answer.pooled]
            return
        with self._served.client(answer.tenant, at=answer.at) as client:
            yield client

    def _whole(self, client: openai.OpenAI, answer: Answer, fields: dict[str, Any]) -> str:
        raw = client.completions.with_raw_response.create(**fields)
        _told_by(answer, raw.headers)
        answer.first_byte = time.monotonic()
        return str(raw.parse().choices[0].finish_reason)

    def _stream(self, client: openai.OpenAI, answer: Answer, fields: dict[str, Any]) -> str:
        """Why it ended; "" where nobody said so."""
        raw = client.completions.with_raw_response.create(stream=True, **fields)
        _told_by(answer, raw.headers)
        answer.first_byte = time.monotonic()  # the gateway sends headers with the first piece
        reason = ""
        with raw.parse() as events:
            for event in events:
                answer.pieces, answer.latest = answer.pieces + 1, time.monotonic()
                reason = next((each.finish_reason for each in event.choices if each.finish_reason), reason)
                if answer.left.is_set():
                    break
        return reason


def _judged(answer: Answer, reason: str) -> str:
    """What is wrong with an answer that came; "" when nothing is."""
    if reason != "length":
        return f"it broke off: {reason or 'no end'}"
    own = answer.model == BASE or answer.adapter_id.startswith(f"{answer.tenant}/{answer.model}@")
    return "" if own else f"{answer.adapter_id} answered"


def _told_by(answer: Answer, headers: httpx2.Headers) -> None:
    answer.replica = headers.get("x-loraplane-replica", "")
    answer.adapter_id = headers.get("x-loraplane-adapter-id", "")
    answer.residency = headers.get("x-loraplane-residency", "")


@contextlib.contextmanager
def steady(served: Served, **options: Any) -> Iterator[Load]:
    made = Load(served, **options)
    made.start()
    try:
        made.until_answered(len(ASKED))
        yield made
    finally:
        made.close()
    assert made.running() == [], "they never ended"
