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
from loraplane_cli.supervisor.record import ProcessRecord, Run, read_run
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
from tests.cli.registry_fake import Command
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


def over(base: Path) -> Iterator[Up]:
    system = Up(base)
    yield system
    if system.process is not None and system.process.poll() is None:
        system.process.kill()
        system.process.wait(5)
    shutil.rmtree(system.state.runtime, ignore_errors=True)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    yield from over(tmp_path)


@pytest.fixture(scope="module")
def long_running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    for system in over(tmp_path_factory.mktemp("shared")):
        system.start()
        yield system
        assert system.stop() == 0


@pytest.fixture
def running(long_running: Up) -> Iterator[Up]:
    """One supervisor for all tests that leave it alive; without engines at the start of each."""
    yield long_running
    long_running.ask(DeleteWorkload(namespace="default", pool="smol"))
    wait_until(lambda: not long_running.replicas() and not long_running.endpoints(), 10, "no engine")


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


def test_a_second_start_says_who_holds_the_folder(running: Up) -> None:
    second = subprocess.run(
        [sys.executable, "-m", "tests.cli.standins", running.state.root, running.folder],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert second.returncode != 0
    assert f"already runs on {running.state.root} (process {running.status().pid}" in second.stderr
    assert running.replicas() == []  # the first one still answers


def test_a_killed_child_is_started_again(running: Up) -> None:
    before = {child.name: child.pid for child in running.run().children}
    os.kill(before["gateway-0"], signal.SIGKILL)

    def again() -> bool:
        part = next(part for part in running.status().parts if part.name == "gateway-0")
        return part.restarts == 1 and part.phase == "ready" and part.pid not in (0, before["gateway-0"])

    wait_until(again, 10, "the gateway again")
    assert {child.name: child.pid for child in running.run().children}["registry"] == before["registry"]


def test_a_part_that_cannot_start_ends_the_start_with_its_last_words(up: Up) -> None:
    up.start("registry", wait=False)
    assert up.process is not None
    assert up.process.wait(20) != 0
    assert up.status().phase == "failed"
    assert "no such table" in up.status().message
    assert not up.state.lock.exists()
    assert not up.state.runtime.exists()


def test_replicas_come_and_go_with_their_endpoints(running: Up) -> None:
    answer = running.ask(workload(2))
    assert answer.ok
    running.wait_ready(2)
    assert set(running.endpoints()) == {"default.smol-0.json", "default.smol-1.json"}
    first = running.endpoints()["default.smol-0.json"]
    assert (first.epoch, first.terminating) == (3, False)
    replica = running.replicas()[0]
    assert (replica.ready, replica.revision, replica.data_port) == (True, "r1", first.data_port)
    credentials = running.state.credentials(PoolRef("default", "smol"))
    assert stat.S_IMODE(credentials.stat().st_mode) == 0o600
    assert msgspec.json.decode(credentials.read_bytes(), type=EngineCredentials) == CREDENTIALS
    running.ask(workload(1))
    running.wait_ready(1)
    wait_until(lambda: set(running.endpoints()) == {"default.smol-0.json"}, 5, "one endpoint")
    running.ask(DeleteWorkload(namespace="default", pool="smol"))
    wait_until(lambda: not running.endpoints() and running.replicas() == [], 5, "no endpoint")
    assert not credentials.exists()


def test_a_dead_engine_leaves_its_endpoint_within_half_a_second_and_returns(running: Up) -> None:
    running.ask(workload(2))
    running.wait_ready(2)
    victim = running.replicas()[1]
    os.kill(victim.pid, signal.SIGKILL)
    wait_until(lambda: not running.endpoints()["default.smol-1.json"].ready, 0.5, "not ready")
    assert running.endpoints()["default.smol-0.json"].ready
    running.wait_ready(2)
    again = running.replicas()[1]
    assert (again.restarts, again.data_port) == (1, victim.data_port)
    assert again.pid != victim.pid


def test_a_new_revision_is_used_only_when_a_replica_is_restarted(running: Up) -> None:
    running.ask(workload(2))
    running.wait_ready(2)
    before = running.replicas()
    running.ask(workload(2, "r2", **{"max-rank": "16"}))
    assert [(replica.pid, replica.revision) for replica in running.replicas()] == [(r.pid, "r1") for r in before]
    running.ask(RestartReplica(namespace="default", pool="smol", ordinal=1))
    wait_until(lambda: running.replicas()[1].revision == "r2" and running.replicas()[1].ready, 10, "the new revision")
    assert running.replicas()[0] == before[0]
    assert "--max-rank 16" in " ".join(psutil.Process(running.replicas()[1].pid).cmdline())


def test_engines_get_their_share_of_the_cores(running: Up) -> None:
    running.ask(workload(1))
    running.wait_ready(1)
    process = psutil.Process(running.replicas()[0].pid)
    cores = str(len(os.sched_getaffinity(0)))
    line = process.cmdline()
    assert line[line.index("--threads") + 1] == cores == process.environ()["OMP_NUM_THREADS"]
    assert line[line.index("--replica") + 1] == "default/smol/0"


@pytest.mark.parametrize(
    ("line", "code"), [(b"not json\n", "invalid_request"), (b'{"type":"restart","namespace":"a","pool":"b"}\n', None)]
)
def test_bad_requests_on_the_socket_are_refused_with_a_reason(running: Up, line: bytes, code: str | None) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(5)
        client.connect(str(running.state.socket))
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
    assert not running.ask(RestartReplica(namespace="no", pool="such", ordinal=0)).ok


def test_tenant_documents_are_applied_and_their_keys_kept(running: Up) -> None:
    (running.folder / "acme.yaml").write_text(TENANT % "acme")
    wait_until(lambda: "LORAPLANE_KEY_ACME" in read_env(running.state.env), 5, "the key in env")
    key = read_env(running.state.env)["LORAPLANE_KEY_ACME"]
    assert stat.S_IMODE(running.state.env.stat().st_mode) == 0o600
    (running.folder / "more").mkdir()
    (running.folder / "more" / "new.yaml").write_text("a: [\n")  # a broken file hides no other
    (running.folder / "more" / "big-co.yaml").write_text(TENANT % "big-co")
    wait_until(lambda: "LORAPLANE_KEY_BIG_CO" in read_env(running.state.env), 2, "the second key within two seconds")
    assert read_env(running.state.env)["LORAPLANE_KEY_ACME"] == key
    sourced = subprocess.run(
        ["sh", "-c", '. "$1"; printf "%s|%s" "$LORAPLANE_DATABASE_URL" "$LORAPLANE_KEY_ACME"', "sh", running.state.env],
        capture_output=True,
        text=True,
        check=True,
        timeout=5,
    )
    assert sourced.stdout == f"postgresql://loraplane:it's%20secret@127.0.0.1/loraplane|{key}"


def test_a_supervisor_whose_state_folder_was_removed_ends_with_its_children(up: Up) -> None:
    up.start()
    up.ask(workload(1))
    up.wait_ready(1)
    pids = [child.pid for child in up.run().children]
    runtime = up.state.runtime
    shutil.rmtree(up.state.root)
    assert up.process is not None
    assert up.process.wait(15) == 0
    assert gone(pids)
    assert not runtime.exists()


def test_down_stops_a_running_up_and_purge_keeps_only_models(up: Up) -> None:
    up.start()
    (up.state.models / "kept").mkdir()
    assert up.process is not None
    pids = [up.process.pid, *(child.pid for child in up.run().children)]
    command = Command(up.state.root)
    assert command.json("down") == {"stopped": True, "ended": [], "purged": False}
    assert up.process.wait(5) == 0
    assert gone(pids)
    assert command.json("down", "--purge") == {"stopped": False, "ended": [], "purged": True}
    assert [path.name for path in up.state.root.iterdir()] == ["models"]
    assert (up.state.models / "kept").exists()


def test_down_clears_away_what_a_killed_up_left(up: Up) -> None:
    up.start()
    assert up.process is not None
    pids = [child.pid for child in up.run().children]
    up.process.kill()
    up.process.wait(5)
    assert Command(up.state.root).json("down")["stopped"] is False
    assert gone(pids)
    assert not up.state.runtime.exists()
    assert not {path.name for path in up.state.root.iterdir()} & {"lock", "run.json", "env", "status.json"}


def test_a_process_that_only_has_a_recorded_id_is_never_ended(up: Up) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as stranger:
        up.state.create()
        record = ProcessRecord(name="gateway-0", pid=stranger.pid, created=1.0)
        run = Run(token="none", supervisor=record, folder="/", children=[record])
        up.state.run.write_bytes(msgspec.json.encode(run))
        assert Command(up.state.root).json("down") == {"stopped": False, "ended": [], "purged": False}
        assert stranger.poll() is None
        stranger.kill()
