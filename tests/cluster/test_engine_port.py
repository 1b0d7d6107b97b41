"""The admin port's contract, against the real engine with the real model and against the fake engine process.

Neither needs a cluster: each is one process on loopback with an artifact listener in this process.
"""

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from loraplane_core.artifact.digest import artifact_digest
from loraplane_core.wire.engine import Heartbeat, Hello, Snapshot, StateMessage
from tests.cluster.models import model_root, tiny_adapter
from tests.cluster.services import ROOT, Process, until
from tests.gateway.postgres import free_port

TOKENS = {"epoch": 2, "data": ["data-2"], "state": ["state-2"], "admin": ["admin-2", "admin-1"], "fetch": "fetch-2"}
#: Of the real model's memory, in bytes: 16 tokens, keys and values, 30 layers of 3 heads of 64 in float32.
PAGE = 16 * 2 * 30 * 3 * 64 * 4
pytestmark = pytest.mark.timeout(120)


@dataclass
class Source:
    """Serves artifacts by digest to whoever shows the fetch credential."""

    folders: dict[str, Path] = field(default_factory=dict)
    corrupt: bool = False
    served: int = 0
    port: int = 0


@dataclass
class Bench:
    """An engine whose host memory has room for two of its three artifacts, and its device memory for one."""

    admin: httpx.Client
    data: str  # url
    source: Source
    artifacts: list[tuple[str, int]]  # (digest, bytes of the weights)
    size: int  # of each in memory

    def put(self, ref: str, number: int, **changes: Any) -> httpx.Response:
        digest, size = self.artifacts[number]
        body = {"digest": digest, "bytes": size, "rank": 8, "deadline_s": 20, **changes}
        return self.admin.put(f"/adapters/{ref}", json=body)

    def delete(self, ref: str, number: int) -> httpx.Response:
        headers = {"x-loraplane-digest": self.artifacts[number][0]}
        return self.admin.delete(f"/adapters/{ref}?drain_s=1", headers=headers)

    def pin(self, ref: str, number: int, **marks: bool) -> httpx.Response:
        headers = {"x-loraplane-digest": self.artifacts[number][0]}
        return self.admin.post(f"/adapters/{ref}/pin", json=marks, headers=headers)

    def ask(self, ref: str, number: int) -> httpx.Response:
        """A request of a tenant, as the gateway sends it."""
        name, _, version = ref.rpartition("/")
        digest, size = self.artifacts[number]
        headers = {
            "authorization": "Bearer data-2",
            "x-loraplane-adapter": f"{name}@{version}",
            "x-loraplane-digest": digest,
            "x-loraplane-bytes": str(size),
            "x-loraplane-rank": "8",
            "x-loraplane-base-digest": self.admin.get("/model").json()["base_digest"],
        }
        body = {"model": name, "prompt": "hi", "max_tokens": 1}
        return httpx.post(f"{self.data}/v1/completions", json=body, headers=headers, timeout=30, trust_env=False)

    def capacity(self) -> dict[str, Any]:
        found: dict[str, Any] = self.admin.get("/adapters").json()["capacity"]
        return found

    def clear(self) -> None:
        for ref in self.listed():
            digest = self.listed()[ref]["digest"]
            headers = {"x-loraplane-digest": digest}
            assert self.admin.delete(f"/adapters/{ref.replace('@', '/')}?drain_s=1", headers=headers).is_success

    def listed(self) -> dict[str, dict[str, Any]]:
        return {each["ref"]: each for each in self.admin.get("/adapters").json()["adapters"]}


@pytest.fixture(scope="module")
def source() -> Iterator[Source]:
    found = Source()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _, _, digest, name = self.path.split("/")
            folder = found.folders.get(digest)
            allowed = self.headers["authorization"] == "Bearer fetch-2" and self.headers["x-loraplane-epoch"] == "2"
            if folder is None or not allowed:
                self.send_error(404 if allowed else 401)
                return
            body = (folder / name).read_bytes() + (b" " if found.corrupt and name.endswith(".json") else b"")
            found.served += 1
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            del format, args

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield found
        server.shutdown()
        thread.join(timeout=10)


@pytest.fixture(scope="module", params=["fake", "real"])
def bench(request: pytest.FixtureRequest, source: Source, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp(request.param)
    model_root(folder / "models")
    real = request.param == "real"
    if real:
        folders = [ROOT / "examples" / "adapters" / name for name in ("pirate", "html", "json")]
    else:
        folders = [tiny_adapter(folder / str(number), number) for number in range(3)]
    artifacts = [(artifact_digest(each), (each / "adapter_model.safetensors").stat().st_size) for each in folders]
    size = 3 * PAGE if real else artifacts[0][1]
    budgets = {"host-cache": 5 * size // 2, "adapter-memory": 3 * size // 2}
    source.folders |= {digest: each for (digest, _), each in zip(artifacts, folders, strict=True)}
    credentials = folder / "credentials.json"
    credentials.touch(0o600)
    credentials.write_text(json.dumps(TOKENS))
    ports = {name: free_port() for name in ("port", "admin-port", "metrics-port")}
    engine = Process("engine", folder)
    engine.start(
        "loraplane_engine" if real else "tests.cluster.fake_engine",
        *("--model", str(folder / "models" / ("smollm2-135m-instruct" if real else "tiny"))),
        *("--credentials", str(credentials), "--replica", "serving/smol/0", "--cache-dir", str(folder / "cache")),
        *("--artifacts-url", f"http://127.0.0.1:{source.port}", "--max-model-len", "256"),
        *(f"--{name}={value}" for name, value in (*ports.items(), *budgets.items())),
        env={"HOME": str(folder)},
    )
    admin = f"http://127.0.0.1:{ports['admin-port']}"
    health = f"http://127.0.0.1:{ports['metrics-port']}/health/ready"
    try:
        with httpx.Client(
            base_url=admin, headers={"authorization": "Bearer admin-2"}, timeout=30, trust_env=False
        ) as client:
            until(lambda: _answers(health), 60, engine.tail)
            yield Bench(client, f"http://127.0.0.1:{ports['port']}", source, artifacts, size)
    finally:
        engine.stop()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2, trust_env=False).is_success
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize(
    ("method", "path", "token", "status"),
    [
        ("GET", "/adapters", "", 401),
        ("GET", "/adapters", "data-2", 401),
        ("GET", "/adapters", "state-2", 200),
        ("GET", "/model", "state-2", 200),
        ("GET", "/model", "admin-1", 200),
        ("PUT", "/adapters/acme/x/1", "state-2", 403),
        ("DELETE", "/adapters/acme/x/1", "state-2", 403),
        ("POST", "/adapters/acme/x/1/pin", "state-2", 403),
        ("PUT", "/adapters/acme/x/1", "admin-3", 401),
        ("POST", "/adapters/acme/x/1/pin", "", 401),
        ("DELETE", "/adapters/acme/x/1", "", 401),
    ],
)
def test_every_route_that_changes_something_needs_the_admin_credential_o53(
    bench: Bench, method: str, path: str, token: str, status: int
) -> None:
    headers = {"authorization": f"Bearer {token}" if token else ""}
    body = {"digest": "0" * 64, "bytes": 1, "rank": 1, "pinned": False}
    answer = bench.admin.request(method, path, headers=headers, json=body if method != "GET" else None)
    assert answer.status_code == status, answer.text
    assert bench.listed() == {}


def test_a_put_fetches_answers_when_warm_and_is_idempotent(bench: Bench) -> None:
    before = bench.source.served
    first = bench.put("acme/a/1", 0)
    assert first.status_code == 200, first.text
    assert first.json()["residency"] in ("host", "device") and first.json()["warm_wanted"]
    assert bench.put("acme/a/1", 0).json()["since"] == first.json()["since"]
    assert bench.source.served - before == 2
    assert bench.listed()["acme/a@1"]["digest"] == bench.artifacts[0][0]
    assert bench.delete("acme/a/1", 0).json()["residency"] == "absent"


def test_another_digest_for_a_known_version_is_refused_o43(bench: Bench) -> None:
    assert bench.put("acme/b/1", 0).is_success
    assert bench.put("acme/b/1", 1).json()["error"]["code"] == "digest_conflict"
    assert bench.put("acme/b/2", 1).is_success
    for version, number in ((1, 0), (2, 1)):
        assert bench.delete(f"acme/b/{version}", number).is_success


def test_bytes_that_are_not_what_their_digest_says_are_refused_and_may_be_right_later(bench: Bench) -> None:
    bench.source.corrupt = True
    try:
        refused = bench.put("acme/c/1", 2)
    finally:
        bench.source.corrupt = False
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "artifact_unavailable")
    assert bench.put("acme/c/1", 2).is_success
    assert bench.delete("acme/c/1", 2).is_success


def test_an_artifact_larger_than_announced_is_refused(bench: Bench) -> None:
    assert bench.put("acme/d/1", 2, bytes=10).json()["error"]["code"] == "artifact_unavailable"
    assert bench.delete("acme/d/1", 2).is_success


def test_a_deleted_version_is_gone_and_comes_back_by_a_put(bench: Bench) -> None:
    assert bench.put("acme/e/1", 0).is_success
    assert bench.delete("acme/e/1", 0).is_success
    assert bench.delete("acme/e/1", 0).is_success
    assert "acme/e@1" not in bench.listed()
    assert bench.put("acme/e/1", 0).is_success
    assert bench.delete("acme/e/1", 0).is_success


def test_pins_change_marks_and_need_a_warm_adapter(bench: Bench) -> None:
    headers = {"x-loraplane-digest": bench.artifacts[0][0]}
    where = "/adapters/acme/f/1/pin"
    assert bench.admin.post(where, json={"pinned": True}, headers=headers).status_code == 404
    assert bench.put("acme/f/1", 0).is_success
    pinned = bench.admin.post(where, json={"pinned": True}, headers=headers).json()
    assert (pinned["pinned"], pinned["warm_wanted"]) == (True, True)
    cached = bench.admin.post(where, json={"pinned": False, "warm": False}, headers=headers).json()
    assert (cached["pinned"], cached["warm_wanted"]) == (False, False)
    assert bench.delete("acme/f/1", 0).is_success


@pytest.fixture
def empty(bench: Bench) -> Iterator[Bench]:
    yield bench
    bench.clear()


def test_marks_come_and_go_without_a_load_and_the_capacity_tells_what_they_reserve(empty: Bench) -> None:
    size = empty.size
    assert empty.capacity()["host_bytes"] == 5 * size // 2
    assert size <= empty.capacity()["adapter_bytes"] <= 3 * size // 2  # in whole pages

    def reserves(host: int, device: int) -> None:
        told = ("host_reserved_bytes", "reserved_bytes")
        until(lambda: [empty.capacity()[name] for name in told] == [host, device], 5, lambda: str(empty.capacity()))

    reserves(0, 0)
    first = empty.put("acme/m/1", 0).json()
    assert (first["bytes"], first["pinned"], first["warm_wanted"]) == (size, False, True)
    reserves(size, 0)
    served = empty.source.served
    assert empty.pin("acme/m/1", 0, pinned=True, warm=True).json()["residency"] == "device"
    reserves(size, size)
    assert empty.pin("acme/m/1", 0, pinned=False, warm=False).json()["bytes"] == size
    reserves(0, 0)
    assert empty.put("acme/m/1", 0, pinned=True).json()["pinned"]
    assert empty.source.served == served
    reserves(size, size)
    assert empty.delete("acme/m/1", 0).is_success
    reserves(0, 0)


def test_a_pin_that_does_not_fit_is_refused_with_the_arithmetic_and_the_adapter_is_warm(empty: Bench) -> None:
    assert empty.put("acme/m/1", 0, pinned=True).json()["residency"] == "device"
    for refused in (empty.put("acme/n/1", 1, pinned=True), empty.pin("acme/n/1", 1, pinned=True, warm=True)):
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "insufficient_memory")
        message = refused.json()["error"]["message"]
        assert f"needs {empty.size} bytes of device memory; 1 pinned adapters hold {empty.size} of" in message
    told = empty.listed()["acme/n@1"]
    assert (told["residency"] in ("host", "device"), told["warm_wanted"], told["pinned"]) == (True, True, False)
    assert told["message"] == message
    assert empty.pin("acme/m/1", 0, pinned=False).is_success
    pinned = empty.pin("acme/n/1", 1, pinned=True).json()
    assert (pinned["pinned"], pinned["residency"], pinned["message"]) == (True, "device", "")


def test_neither_a_wish_nor_a_request_takes_the_place_of_what_is_warm(empty: Bench) -> None:
    for ref, number in (("acme/m/1", 0), ("acme/n/1", 1)):
        assert empty.put(ref, number).is_success
    for refused in (empty.put("acme/o/1", 2), empty.ask("acme/o/1", 2)):
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "insufficient_memory")
        message = refused.json()["error"]["message"]
        assert f"needs {empty.size} bytes of host memory" in message
        assert f"reserved {2 * empty.size} of {5 * empty.size // 2}, so {empty.size // 2} are free" in message
    told = empty.listed()
    assert all(told[ref]["residency"] in ("host", "device") for ref in ("acme/m@1", "acme/n@1"))
    assert (told["acme/o@1"]["residency"], told["acme/o@1"]["bytes"]) == ("disk", empty.size)
    assert empty.pin("acme/m/1", 0, pinned=False, warm=False).is_success
    assert empty.put("acme/o/1", 2).is_success
    told = empty.listed()
    assert told.get("acme/m@1", {"residency": "absent"})["residency"] in ("disk", "absent")
    assert told["acme/n@1"]["residency"] in ("host", "device")


def test_what_a_request_brought_in_goes_first(empty: Bench) -> None:
    assert empty.put("acme/m/1", 0).is_success
    assert empty.ask("acme/cold/1", 1).is_success  # a name that was never withdrawn here
    assert empty.listed()["acme/cold@1"]["warm_wanted"] is False
    assert empty.put("acme/o/1", 2).is_success
    told = empty.listed()
    assert {ref for ref, each in told.items() if each["residency"] in ("host", "device")} == {"acme/m@1", "acme/o@1"}


def test_the_next_version_takes_the_place_of_the_one_before_it(empty: Bench) -> None:
    for ref, number in (("acme/m/1", 0), ("acme/n/1", 1), ("acme/m/2", 2)):
        assert empty.put(ref, number).is_success
    told = empty.listed()
    assert {ref for ref, each in told.items() if each["residency"] in ("host", "device")} == {"acme/n@1", "acme/m@2"}


def test_state_greets_tells_all_then_changes_then_beats(bench: Bench) -> None:
    with bench.admin.stream("GET", "/state", headers={"authorization": "Bearer state-2"}) as stream:
        lines = stream.iter_lines()
        hello, snapshot = _message(next(lines)), _message(next(lines))
        assert isinstance(hello, Hello) and hello.replica == "serving/smol/0" and len(hello.base_digest) == 64
        assert isinstance(snapshot, Snapshot) and snapshot.adapters == []
        assert bench.put("acme/g/1", 0).is_success
        seq, warm, beat, deadline = snapshot.seq, False, False, time.monotonic() + 15
        while not (warm and beat) and time.monotonic() < deadline:
            message = _message(next(lines))
            assert not isinstance(message, Hello) and message.seq == seq + 1
            seq = message.seq
            beat |= isinstance(message, Heartbeat)
            warm |= any(each.residency in ("host", "device") for each in getattr(message, "adapters", []))
        assert warm and beat
    assert bench.delete("acme/g/1", 0).is_success


def _message(line: str) -> StateMessage:
    return msgspec.json.decode(line, type=StateMessage)


def test_the_model_tells_what_preflight_needs(bench: Bench) -> None:
    info = bench.admin.get("/model").json()
    assert {"hidden_size", "num_hidden_layers", "num_attention_heads"} <= info["config"].keys()
    assert info["max_model_len"] == 256 and info["max_rank"] >= 8
