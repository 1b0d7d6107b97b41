"""The registry's admin REST at the HTTP level, for the commands: answers from a table, and records what was asked."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from loraplane_cli import session
from loraplane_cli.admin import AdminClient
from loraplane_cli.app import app
from loraplane_cli.output import fail
from loraplane_core.errors import LoraplaneError

Answer = tuple[int, Any] | Callable[[httpx.Request], tuple[int, Any]]


class Registry:
    def __init__(self) -> None:
        self.answers: dict[tuple[str, str], Answer] = {}
        self.asked: list[httpx.Request] = []

    def on(self, method: str, path: str, status: int, body: Any) -> None:
        self.answers[method, path] = (status, body)

    def handle(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        answer = self.answers[request.method, request.url.path]
        status, body = answer(request) if callable(answer) else answer
        return httpx.Response(status, json=body)

    def bodies(self) -> list[Any]:
        return [json.loads(request.content) for request in self.asked if request.content]


class Command:
    """Runs the command line in this process, with the exit status and output a shell would see."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self.output = ""
        self.errors = ""

    def run(self, *words: str) -> int:
        result = CliRunner().invoke(app, list(words), env={"LORAPLANE_STATE_DIR": str(self._state)})
        self.output, self.errors = result.stdout, result.stderr
        if isinstance(result.exception, LoraplaneError):
            return fail(result.exception, as_json="--json" in words)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code

    def json(self, *words: str) -> Any:
        assert self.run(*words, "--json") == 0, self.errors
        return json.loads(self.output)


def install(monkeypatch: pytest.MonkeyPatch) -> Registry:
    registry = Registry()
    client = partial(AdminClient, transport=httpx.MockTransport(registry.handle))
    monkeypatch.setattr(session, "AdminClient", client)
    monkeypatch.setenv("LORAPLANE_ADMIN_URL", "http://registry.test")
    monkeypatch.setenv("LORAPLANE_ADMIN_KEY", "platform")
    return registry
