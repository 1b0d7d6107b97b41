"""The supervisor as a process, over stand-ins: start, watch, stop, kill -9, and the next start."""

import contextlib
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from loraplane_cli.envfile import read_env
from loraplane_cli.supervisor.layout import StateFolder
from loraplane_cli.supervisor.record import Run, read_run
from loraplane_cli.supervisor.status import SupervisorStatus, read_status
from loraplane_core.identity import PoolRef
from loraplane_core.wire.endpoints import Endpoint, from_slice
from loraplane_core.wire.supervisor import (
    ApplyWorkload,
    DeleteWorkload,
    EngineCredentials,
    ListWorkloads,
    ReplicaStatus,
    RestartReplica,
    SupervisorAnswer,
    SupervisorRequest,
    Workload,
)
from tests.cli.standins import ROOT
from tests.cli.waiting import wait_until

CREDENTIALS = EngineCredentials(epoch=3, data=["d"], state=["s"], admin=["a"], fetch="f")
TENANT = """
apiVersion: loraplane.dev/v1alpha1
kind: Tenant
metadata: {name: %s}
spec: {namespaces: [default]}
"""


class Up:
    """A supervisor in a process of its own."""

    def __init__(self, base: Path) -> None:
        self.state = StateFolder.of(base / "state")
        self.folder = base / "objects"
        self.folder.mkdir(exist_ok=True)
        self.output = base / "output"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, broken: str = "", *, wait: bool = True) -> None:
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.cli.standins", self.state.root, self.folder, broken],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        if wait:
            self.wait_running()

    def wait_running(self) -> None:
        pid = self.process.pid if self.process else 0
        wait_until(lambda: (self.status().phase, self.status().pid) == ("running", pid), 15, "running")

    def status(self) -> SupervisorStatus:
        return read_status(self.state) or SupervisorStatus(phase="starting", pid=0, folder="")

    def run(self) -> Run:
        run = read_run(self.state)
        assert run is not None
        return run

    def stop(self, signum: int = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(signum)
        return self.process.wait(20)

    def ask(self, request: SupervisorRequest) -> SupervisorAnswer:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(5)
            client.connect(str(self.state.socket))
            client.sendall(msgspec.json.encode(request) + b"\n")
            answer = client.makefile("rb").readline()
        return msgspec.json.decode(answer, type=SupervisorAnswer)

    def replicas(self) -> list[ReplicaStatus]:
        return [replica for pool in self.ask(ListWorkloads()).workloads for replica in pool.replicas]

    def endpoints(self) -> dict[str, Endpoint]:
        found = {}
        for path in self.state.endpoints.glob("*.json"):
            with contextlib.suppress(FileNotFoundError):
                found[path.name] = from_slice(json.loads(path.read_text()))[0]
        return found

    def wait_ready(self, count: int) -> None:
        def ready() -> bool:
            return sum(endpoint.ready for endpoint in self.endpoints().values()) == count == len(self.endpoints())

        wait_until(ready, 20, f"{count} endpoints ready")


def workload(replicas: int, revision: str = "r1", **engine: str) -> ApplyWorkload:
    wished = Workload(
        namespace="default",
        pool="smol",
        replicas=replicas,
        engine={"model": "/models/m", "max-rank": "8", **engine},
        credentials=CREDENTIALS,
        revision=revision,
    )
    return ApplyWorkload(workload=wished)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    system = Up(tmp_path)
    yield system
    if system.process is not None and system.process.poll() is None:
        system.process.kill()
        system.process.wait(5)
    shutil.rmtree(system.state.runtime, ignore_errors=True)


def gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


def test_an_orderly_stop_leaves_no_process_lock_socket_or_folder(up: Up) -> None:
    up.start()
    up.ask(workload(1))
    up.wait_ready(1)
    pids = [child.pid for child in up.run().children]
    assert len(pids) == 4
    assert stat.S_IMODE(up.state.runtime.stat().st_mode) == 0o700
    assert up.stop(signal.SIGINT) == 0
    assert gone(pids)
    left = {path.name for path in up.state.root.iterdir()}
    assert not left & {"lock", "run.json", "env", "status.json"}
    assert not up.state.runtime.exists()
    assert list(up.state.endpoints.iterdir()) == []


def test_children_of_a_killed_supervisor_end_and_the_next_start_works_at_once(up: Up) -> None:
    up.start()
    up.ask(workload(1))
    up.wait_ready(1)
    pids = [child.pid for child in up.run().children]
    gateway = read_env(up.state.env)["LORAPLANE_GATEWAY_URL"]
    assert up.process is not None
    up.process.kill()
    up.process.wait(5)
    killed = time.monotonic()
    up.start()
    assert time.monotonic() - killed < 15
    assert gone(pids)
    assert read_env(up.state.env)["LORAPLANE_GATEWAY_URL"] == gateway
    assert up.stop() == 0


def test_without_a_next_start_children_of_a_killed_supervisor_end_within_five_seconds(up: Up) -> None:
    up.start()
    up.ask(workload(1))
    up.wait_ready(1)
    pids = [child.pid for child in up.run().children]
    assert up.process is not None
    up.process.kill()
    up.process.wait(5)
    wait_until(lambda: gone(pids), 5, "children gone")


def test_a_second_start_says_who_holds_the_folder(up: Up) -> None:
    up.start()
    second = subprocess.run(
        [sys.executable, "-m", "tests.cli.standins", up.state.root, up.folder],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert second.returncode != 0
    assert f"already runs on {up.state.root} (process {up.status().pid}" in second.stderr
    assert up.replicas() == []  # the first one still answers
    assert up.stop() == 0


def test_a_killed_child_is_started_again(up: Up) -> None:
    up.start()
    before = {child.name: child.pid for child in up.run().children}
    os.kill(before["gateway-0"], signal.SIGKILL)

    def again() -> bool:
        part = next(part for part in up.status().parts if part.name == "gateway-0")
        return part.restarts == 1 and part.phase == "ready" and part.pid not in (0, before["gateway-0"])

    wait_until(again, 10, "the gateway again")
    assert {child.name: child.pid for child in up.run().children}["registry"] == before["registry"]
    assert up.stop() == 0


def test_a_part_that_cannot_start_ends_the_start_with_its_last_words(up: Up) -> None:
    up.start("registry", wait=False)
    assert up.process is not None
    assert up.process.wait(20) != 0
    assert up.status().phase == "failed"
    assert "no such table" in up.status().message
    assert not up.state.lock.exists()
    assert not up.state.runtime.exists()


def test_replicas_come_and_go_with_their_endpoints(up: Up) -> None:
    up.start()
    answer = up.ask(workload(2))
    assert answer.ok
    up.wait_ready(2)
    assert set(up.endpoints()) == {"default.smol-0.json", "default.smol-1.json"}
    first = up.endpoints()["default.smol-0.json"]
    assert (first.epoch, first.terminating) == (3, False)
    replica = up.replicas()[0]
    assert (replica.ready, replica.revision, replica.data_port) == (True, "r1", first.data_port)
    credentials = up.state.credentials(PoolRef("default", "smol"))
    assert stat.S_IMODE(credentials.stat().st_mode) == 0o600
    assert msgspec.json.decode(credentials.read_bytes(), type=EngineCredentials) == CREDENTIALS
    up.ask(workload(1))
    up.wait_ready(1)
    wait_until(lambda: set(up.endpoints()) == {"default.smol-0.json"}, 5, "one endpoint")
    up.ask(DeleteWorkload(namespace="default", pool="smol"))
    wait_until(lambda: not up.endpoints() and up.replicas() == [], 5, "no endpoint")
    assert not credentials.exists()
    assert up.stop() == 0


def test_a_dead_engine_leaves_its_endpoint_within_half_a_second_and_returns(up: Up) -> None:
    up.start()
    up.ask(workload(2))
    up.wait_ready(2)
    victim = up.replicas()[1]
    os.kill(victim.pid, signal.SIGKILL)
    wait_until(lambda: not up.endpoints()["default.smol-1.json"].ready, 0.5, "not ready")
    assert up.endpoints()["default.smol-0.json"].ready
    up.wait_ready(2)
    again = up.replicas()[1]
    assert (again.restarts, again.data_port) == (1, victim.data_port)
    assert again.pid != victim.pid
    assert up.stop() == 0


def test_a_new_revision_is_used_only_when_a_replica_is_restarted(up: Up) -> None:
    up.start()
    up.ask(workload(2))
    up.wait_ready(2)
    before = up.replicas()
    up.ask(workload(2, "r2", **{"max-rank": "16"}))
    assert [(replica.pid, replica.revision) for replica in up.replicas()] == [(r.pid, "r1") for r in before]
    up.ask(RestartReplica(namespace="default", pool="smol", ordinal=1))
    wait_until(lambda: up.replicas()[1].revision == "r2" and up.replicas()[1].ready, 10, "the new revision")
    assert up.replicas()[0] == before[0]
    assert "--max-rank 16" in " ".join(psutil.Process(up.replicas()[1].pid).cmdline())
    assert up.stop() == 0


def test_engines_get_their_share_of_the_cores(up: Up) -> None:
    up.start()
    up.ask(workload(1))
    up.wait_ready(1)
    process = psutil.Process(up.replicas()[0].pid)
    cores = str(len(os.sched_getaffinity(0)))
    line = process.cmdline()
    assert line[line.index("--threads") + 1] == cores == process.environ()["OMP_NUM_THREADS"]
    assert line[line.index("--replica") + 1] == "default/smol/0"
    assert up.stop() == 0


@pytest.mark.parametrize(
    ("line", "code"), [(b"not json\n", "invalid_request"), (b'{"type":"restart","namespace":"a","pool":"b"}\n', None)]
)
def test_bad_requests_on_the_socket_are_refused_with_a_reason(up: Up, line: bytes, code: str | None) -> None:
    up.start()
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(5)
        client.connect(str(up.state.socket))
        stream = client.makefile("rwb")
        stream.write(line)
        stream.flush()
        answer = msgspec.json.decode(stream.readline(), type=SupervisorAnswer)
        assert not answer.ok
        assert answer.error is not None
        assert code is None or answer.error["code"] == code
        stream.write(msgspec.json.encode(ListWorkloads()) + b"\n")  # the connection still serves
        stream.flush()
        assert msgspec.json.decode(stream.readline(), type=SupervisorAnswer).ok
    assert not up.ask(RestartReplica(namespace="no", pool="such", ordinal=0)).ok
    assert up.stop() == 0


def test_tenant_documents_are_applied_and_their_keys_kept(up: Up) -> None:
    (up.folder / "acme.yaml").write_text(TENANT % "acme")
    up.start()
    wait_until(lambda: "LORAPLANE_KEY_ACME" in read_env(up.state.env), 5, "the key in env")
    key = read_env(up.state.env)["LORAPLANE_KEY_ACME"]
    assert stat.S_IMODE(up.state.env.stat().st_mode) == 0o600
    (up.folder / "more").mkdir()
    (up.folder / "more" / "new.yaml").write_text("a: [\n")  # a broken file hides no other
    (up.folder / "more" / "big-co.yaml").write_text(TENANT % "big-co")
    wait_until(lambda: "LORAPLANE_KEY_BIG_CO" in read_env(up.state.env), 2, "the second key within two seconds")
    assert read_env(up.state.env)["LORAPLANE_KEY_ACME"] == key
    sourced = subprocess.run(
        ["sh", "-c", '. "$1"; printf "%s|%s" "$LORAPLANE_DATABASE_URL" "$LORAPLANE_KEY_ACME"', "sh", up.state.env],
        capture_output=True,
        text=True,
        check=True,
        timeout=5,
    )
    assert sourced.stdout == f"postgresql://loraplane:it's%20secret@127.0.0.1/loraplane|{key}"
    assert up.stop() == 0
