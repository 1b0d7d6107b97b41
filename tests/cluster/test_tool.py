"""The tool itself, used as a person would: by its command line, on clusters of their own."""

import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.kube import Kube, Refused
from tests.cluster.services import ROOT, until
from tests.cluster.tool import Cluster, leftovers
from tests.cluster.tool.leftovers import BASE, state_folder
from tests.cluster.tool.processes import start_time

READY_SECONDS = 10.0
RUN_SECONDS = 90.0
NAMESPACES = "/api/v1/namespaces"


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tests.cluster.tool", *arguments]


def tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), cwd=ROOT, capture_output=True, text=True, timeout=RUN_SECONDS, check=False
    )


@contextlib.contextmanager
def spawned(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(command(*arguments), cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        yield child
    finally:
        child.kill()
        child.communicate(timeout=RUN_SECONDS)


@pytest.fixture
def name() -> Iterator[str]:
    chosen = f"tool-{secrets.token_hex(3)}"
    yield chosen
    tool("down", "--name", chosen)
    for kept in BASE.glob(f"{chosen}.*"):
        shutil.rmtree(kept) if kept.is_dir() else kept.unlink()


@pytest.fixture
def kube(cluster: Cluster) -> Iterator[Kube]:
    with contextlib.closing(Kube(cluster.kubeconfig)) as admin:
        yield admin


@pytest.fixture
def namespace(kube: Kube) -> Iterator[str]:
    chosen = f"tool-{secrets.token_hex(3)}"
    kube.call("POST", NAMESPACES, {"metadata": {"name": chosen}})
    yield chosen
    kube.delete(f"{NAMESPACES}/{chosen}")


def until_up(name: str) -> Cluster:
    cluster = Cluster(state_folder(name))
    until(lambda: "controller-manager" in cluster.processes.running(), RUN_SECONDS, f"cluster {name}")
    return cluster


def test_a_cluster_is_ready_within_ten_seconds_and_leaves_nothing(name: str) -> None:
    began = time.monotonic()
    done = tool("run", "--name", name, "--", sys.executable, "-c", "import time; print(time.monotonic())")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) - began <= READY_SECONDS
    assert leftovers(name) == []


def test_run_passes_on_the_exit_status_and_keeps_the_logs_of_a_failure(name: str) -> None:
    done = tool("run", "--name", name, "--", "sh", "-c", "exit 7")
    assert done.returncode == 7
    kept = state_folder(name).with_name(f"{name}.logs")
    assert f"logs of the cluster: {kept}" in done.stderr
    assert {"etcd.log", "api-server.log"} <= {path.name for path in kept.iterdir()}


def test_run_passes_on_a_signal_and_stops_the_cluster(name: str) -> None:
    script = "trap 'echo told; exit 9' TERM; echo up; while :; do sleep 0.1; done"
    with spawned("run", "--name", name, "--", "sh", "-c", script) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        child.terminate()
        assert child.stdout.readline() == "told\n"
        assert child.wait(timeout=RUN_SECONDS) == 9
    assert leftovers(name) == []


def test_what_a_command_leaves_running_ends_with_the_cluster(name: str) -> None:
    done = tool("run", "--name", name, "--", "sh", "-c", "env -i sleep 1000 >/dev/null 2>&1 & echo $!")
    assert done.returncode == 0, done.stderr
    assert start_time(int(done.stdout)) is None


def test_two_clusters_run_side_by_side_and_know_nothing_of_each_other(
    cluster: Cluster, kube: Kube, namespace: str, name: str
) -> None:
    done = tool("run", "--name", name, "--", "kubectl", "get", "namespaces", "-o", "name")
    assert done.returncode == 0, done.stderr
    assert "namespace/default" in done.stdout
    assert namespace not in done.stdout
    assert kube.get(f"{NAMESPACES}/{namespace}") is not None


def test_a_cluster_is_left_running_used_and_stopped(name: str) -> None:
    up = tool("up", "--name", name)
    assert up.returncode == 0, up.stderr
    exported, entering = up.stdout.splitlines()
    # The lines that a person copies.
    used = subprocess.run(
        ["sh", "-c", f"{exported}; {entering}"], capture_output=True, text=True, timeout=RUN_SECONDS, check=False
    )
    assert "kube-system" in used.stdout, used.stderr
    for again in (tool("up", "--name", name), tool("run", "--name", name, "--", "true")):
        assert again.returncode == 1
        assert "runs already; `make cluster-down`" in again.stderr
    assert Cluster(state_folder(name)).running()
    assert tool("down", "--name", name).returncode == 0
    assert leftovers(name) == []


def test_a_running_cluster_is_not_stopped_from_elsewhere(name: str) -> None:
    with spawned("run", "--name", name, "--", "sleep", "1000"):
        cluster = until_up(name)
        down = tool("down", "--name", name)
        assert down.returncode == 1
        assert "belongs to a process that still runs" in down.stderr
        assert cluster.running()


def test_killed_processes_do_not_hinder_the_stop(name: str) -> None:
    assert tool("up", "--name", name).returncode == 0
    processes = Cluster(state_folder(name)).processes
    os.kill(processes.running()["etcd"], signal.SIGKILL)
    os.kill(processes.running()["api-server"], signal.SIGKILL)
    down = tool("down", "--name", name)
    assert down.returncode == 0, down.stderr
    assert leftovers(name) == []


def test_the_killed_tool_takes_its_processes_along_and_the_next_start_works(name: str) -> None:
    with spawned("run", "--name", name, "--", "sleep", "1000") as child:
        cluster = until_up(name)
        pids = cluster.processes.running()
        assert sorted(pids) == ["api-server", "controller-manager", "etcd"]
        child.kill()
        until(lambda: not cluster.processes.running(), 5, lambda: str(cluster.processes.running()))
    assert leftovers(name) != []  # its folder and namespace: what the next start clears
    assert tool("run", "--name", name, "--", "true").returncode == 0
    assert leftovers(name) == []


def test_an_interrupted_start_is_cleaned_up(name: str) -> None:
    with spawned("run", "--name", name, "--", "true") as child:
        cluster = Cluster(state_folder(name))
        until(lambda: "etcd" in cluster.processes.running(), RUN_SECONDS, "etcd")
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=RUN_SECONDS) == 128 + signal.SIGINT
    assert leftovers(name) == []


def test_a_pid_that_another_process_got_is_left_alone(name: str) -> None:
    assert tool("up", "--name", name).returncode == 0
    cluster = Cluster(state_folder(name))
    cluster.processes.kill("etcd")
    stranger = subprocess.Popen(["sleep", "1000"])
    try:
        record = cluster.state / "pids" / "etcd"
        record.write_text(json.dumps({"pid": stranger.pid, "started": 1}))
        cluster.processes.kill("etcd")
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait(timeout=5)


def test_nothing_is_deleted_through_a_mount(name: str, tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    mounted = state_folder(name) / "volumes"
    mounted.mkdir(parents=True)
    subprocess.run(["mount", "--bind", str(tmp_path), str(mounted)], check=True, timeout=5)
    assert tool("down", "--name", name).returncode == 0
    assert (tmp_path / "precious").exists()
    assert leftovers(name) == []


def test_a_token_is_bounded_by_its_roles(cluster: Cluster, kube: Kube, namespace: str) -> None:
    path = f"{NAMESPACES}/{namespace}"
    kube.call("POST", f"{path}/serviceaccounts", {"metadata": {"name": "reader"}})
    rules = [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["list"]}]
    roles = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    kube.call("POST", f"{roles}/roles", {"metadata": {"name": "reader"}, "rules": rules})
    binding = {
        "metadata": {"name": "reader"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader"},
        "subjects": [{"kind": "ServiceAccount", "name": "reader", "namespace": namespace}],
    }
    kube.call("POST", f"{roles}/rolebindings", binding)
    with contextlib.closing(Kube(cluster.service_account_kubeconfig(namespace, "reader"))) as reader:
        until(lambda: _allowed(reader, f"{path}/configmaps"), 5, "the binding")
        assert not _allowed(reader, f"{path}/secrets")
        assert not _allowed(reader, f"{NAMESPACES}/default/configmaps")
    user = f"system:serviceaccount:{namespace}:reader"
    events = [json.loads(line) for line in cluster.audit_log.read_text().splitlines()]
    seen = {(e["objectRef"]["resource"], e["responseStatus"]["code"]) for e in events if e["user"]["username"] == user}
    assert {("configmaps", 200), ("secrets", 403)} <= seen


def _allowed(kube: Kube, path: str) -> bool:
    try:
        kube.call("GET", path)
    except Refused as refused:
        assert refused.status == 403
        return False
    return True


def test_the_api_server_comes_back_with_its_data(cluster: Cluster, kube: Kube, namespace: str) -> None:
    cluster.stop_api_server()
    assert not cluster.running()
    cluster.start_api_server()
    assert kube.get(f"{NAMESPACES}/{namespace}") is not None


def test_a_watch_from_before_a_compaction_is_gone(cluster: Cluster, kube: Kube, namespace: str) -> None:
    path = f"{NAMESPACES}/{namespace}/configmaps"
    old = kube.call("GET", path)["metadata"]["resourceVersion"]
    for number in range(3):
        kube.call("POST", path, {"metadata": {"name": f"later-{number}"}})
    cluster.compact_etcd()
    watch = f"{path}?watch=true&resourceVersion={old}&timeoutSeconds=2"
    command = [str(cluster.kubectl), "--kubeconfig", str(cluster.kubeconfig), "get", "--raw", watch]
    events = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.splitlines()
    assert json.loads(events[0])["object"]["code"] == 410


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_whenever_the_tool_is_killed_the_next_start_works(name: str) -> None:
    """Twenty random moments of a run, and its end, each followed by nothing but a next run."""
    for _ in range(20):
        with spawned("run", "--name", name, "--", "true") as child:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=random.uniform(0.3, 7.0))
            child.kill()
    done = tool("run", "--name", name, "--", "kubectl", "get", "namespaces")
    assert done.returncode == 0, done.stderr
    assert leftovers(name) == []


def test_make_check_says_why_the_cluster_tests_cannot_run() -> None:
    """The tool answers on a machine without Go, and refuses to run there."""
    environment = {**os.environ, "PATH": "/nonexistent"}
    said, refused = (
        subprocess.run(
            command(*arguments), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=30, check=False
        )
        for arguments in (["why-not"], ["run", "--", "true"])
    )
    assert (said.returncode, said.stdout) == (0, "not on the PATH: go, ip, nsenter, openssl, setpriv")
    assert refused.returncode == 1
    assert "no cluster here: not on the PATH: go" in refused.stderr
