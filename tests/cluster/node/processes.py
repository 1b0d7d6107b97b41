"""The processes of a pod as the node's root sees them: found by the pod's cgroup, ended with -9."""

import os
import signal
from pathlib import Path
from typing import Any

from tests.cluster.tool import Cluster


def kill(cluster: Cluster, pod: dict[str, Any], command: str) -> None:
    """kill -9 of the process whose command line names `command` and which has none of those above it."""
    found = {pid for pid in _of_pod(cluster, pod) if command in _command(pid)}
    first = [pid for pid in found if _parent(pid) not in found]
    assert len(first) == 1, f"{command} in {pod['metadata']['name']}: {[(pid, _command(pid)) for pid in found]}"
    os.kill(first[0], signal.SIGKILL)


def restarts(pod: dict[str, Any]) -> int:
    return sum(each["restartCount"] for each in pod["status"].get("containerStatuses", []))


def _of_pod(cluster: Cluster, pod: dict[str, Any]) -> list[int]:
    """Of this cluster only: another one on this machine may have a pod of the same name."""
    marks = f"/lpc-{cluster.name}/", f"pod{pod['metadata']['uid']}"
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if all(mark in _read(pid, "cgroup") for mark in marks)]


def _command(pid: int) -> str:
    return _read(pid, "cmdline").replace("\0", " ")


def _parent(pid: int) -> int:
    fields = _read(pid, "stat").rpartition(")")[2].split()
    return int(fields[1]) if fields else 0


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:  # it has ended
        return ""
