"""Clients of the data gateway that stream one completion after another, and tell what each of them got."""

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import httpx

from tests.cluster.services import Services

ANSWER_SECONDS = 60.0


@dataclass
class Answer:
    model: str
    began: float
    replica: str = ""
    ended: float = 0.0
    trouble: str = ""  # empty: a whole answer


class Traffic:
    """`clients` threads; each asks for the models in turn, from another one on. Nothing is retried."""

    def __init__(self, services: Services, key: str, models: Sequence[str], *, clients: int, tokens: int) -> None:
        self._url = f"{services.data_url}/v1/completions"
        self._headers = {"authorization": f"Bearer {key}"}
        self._models = list(models)
        self._tokens = tokens
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(clients)]
        self.answers: list[Answer] = []  # of ended requests
        self.running: dict[int, Answer] = {}  # by client

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """What runs is read to its end."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=2 * ANSWER_SECONDS)

    def failed(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.trouble]

    def _run(self, number: int) -> None:
        models = itertools.islice(itertools.cycle(self._models), number, None)
        with httpx.Client(trust_env=False, timeout=ANSWER_SECONDS) as http:
            while not self._stop.is_set():
                answer = self.running[number] = Answer(next(models), time.time())
                try:
                    answer.trouble = self._ask(http, answer)
                except httpx.HTTPError as error:
                    answer.trouble = f"{type(error).__name__}: {error}"
                answer.ended = time.time()
                del self.running[number]
                self.answers.append(answer)

    def _ask(self, http: httpx.Client, answer: Answer) -> str:
        body = {"model": answer.model, "prompt": "Hello", "max_tokens": self._tokens, "ignore_eos": True}
        with http.stream("POST", self._url, json={**body, "stream": True}, headers=self._headers) as response:
            if response.status_code != 200:
                return f"{response.status_code} {response.read().decode()}"
            answer.replica = response.headers["x-loraplane-replica"]
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
        if lines[-1:] != ["[DONE]"]:
            return f"cut off: {lines[-1:]}"
        events = [json.loads(line) for line in lines[:-1]]
        errors = [event["error"] for event in events if "error" in event]
        reasons = [choice["finish_reason"] for event in events for choice in event.get("choices") or []]
        return str(errors) if errors else ("" if "length" in reasons else f"no end: {reasons[-1:]}")


@contextlib.contextmanager
def traffic(
    services: Services, key: str, models: Sequence[str], *, clients: int = 4, tokens: int = 48
) -> Iterator[Traffic]:
    made = Traffic(services, key, models, clients=clients, tokens=tokens)
    made.start()
    try:
        yield made
    finally:
        made.stop()
