"""`loraplane-gateway migrate` before its database: it waits for one that starts, and says why when none came."""

import contextlib
import socket
import subprocess
import sys
import threading

import pytest

from loraplane_gateway.__main__ import main
from loraplane_gateway.db import wait
from tests.gateway.postgres import PostgresServer, free_port

PASSWORD = "not-to-be-told"


class Late:
    """A port that ends the first connection without a word, as one does behind which nothing runs yet; the next ones
    are the server's."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._serving = threading.Thread(target=self._serve)
        self.port = self._listener.getsockname()[1]
        self.asked = 0

    def __enter__(self) -> "Late":
        self._serving.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._serving.join()
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                with client:
                    self.asked += 1
                    if self.asked > 1:
                        self._relay(client)

    def _relay(self, client: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", self._server.port)) as server:
            asking = threading.Thread(target=_copy, args=(client, server))
            asking.start()
            _copy(server, client)
            asking.join()


def _copy(here: socket.socket, there: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := here.recv(1 << 16):
            there.sendall(data)
        there.shutdown(socket.SHUT_WR)


def test_it_waits_for_a_database_that_starts_later(postgres: PostgresServer) -> None:
    """In a process of its own: libpq asks without letting other threads run. What it then says is the server's."""
    with Late(postgres) as late:
        url = f"postgresql://nobody-known:{PASSWORD}@127.0.0.1:{late.port}/postgres"
        command = [sys.executable, "-m", "loraplane_gateway", "migrate", "--owner-url", url, "--wait", "30"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert late.asked > 2
    assert (done.returncode, "password authentication failed" in done.stderr) == (1, True), done.stderr


def test_past_the_deadline_it_says_where_it_asked_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    url = f"postgresql://owner:{PASSWORD}@127.0.0.1:{port}/loraplane"
    assert main(["migrate", "--owner-url", url, "--wait", "0.6"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"loraplane-gateway migrate: the database at 127.0.0.1:{port} took no connection within 0.6 s:"
        " nobody answers there; start it, or wait longer (--wait)"
    )


def test_a_wrong_password_is_told_at_once(
    postgres: PostgresServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No waiting makes it right."""
    monkeypatch.setattr(wait, "sleep", lambda seconds: pytest.fail("waited"))
    url = f"postgresql://nobody-known:{PASSWORD}@127.0.0.1:{postgres.port}/postgres"
    assert main(["migrate", "--owner-url", url, "--wait", "60"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("loraplane-gateway migrate: ")
    assert "password authentication failed" in told
    assert PASSWORD not in told


@pytest.mark.parametrize("url", ["mysql://x@y/z", "loraplane", "postgresql://x@y/z?nonsense=1"])
def test_what_is_no_url_of_a_database_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", "--owner-url", url, "--wait", "60"]) == 2
    assert "URL" in capsys.readouterr().err
