"""Which of many addresses a container reaches: one exec for each pod, and all of them at the same time."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from tests.cluster.tool import Cluster

#: Until what is dropped is given up: two tries of a connection.
PROBE_SECONDS = 2.5
EXEC_SECONDS = 30.0
#: Connects to the targets in its argument; prints for each "open", "shut" when nothing came back, or the error.
PYTHON = """
import concurrent.futures, json, socket, sys
seconds, targets = json.loads(sys.argv[1])
asked = b"\\0\\1\\1\\0\\0\\1\\0\\0\\0\\0\\0\\0" + b"".join(
    bytes([len(part)]) + part for part in b"kubernetes.default.svc.cluster.local.".split(b".")) + b"\\0\\1\\0\\1"
def ask(target):
    protocol, host, port = target
    try:
        with socket.socket(type=socket.SOCK_STREAM if protocol == "tcp" else socket.SOCK_DGRAM) as made:
            made.settimeout(seconds)
            made.connect((host, port))
            if protocol == "udp":
                made.send(asked)
                made.recv(512)
    except TimeoutError:
        return "shut"
    except OSError as error:
        return str(error)
    return "open"
with concurrent.futures.ThreadPoolExecutor(len(targets)) as pool:
    print(json.dumps(list(pool.map(ask, targets))))
"""
#: The same where there is no Python, for TCP: NUMBER open|shut|STATUS, in any order.
BASH = """
number=0
for target; do
    (timeout {seconds} bash -c "</dev/tcp/$target" 2>/dev/null; case $? in
        0) echo $number open;; 124) echo $number shut;; *) echo $number failed;; esac) &
    number=$((number + 1))
done
wait
"""


@dataclass(frozen=True, order=True)
class Target:
    """UDP is a question to a DNS server."""

    address: str
    port: int
    protocol: Literal["tcp", "udp"] = "tcp"


@dataclass(frozen=True)
class Prober:
    namespace: str
    pod: str
    shell: Literal["python", "bash"] = "python"


def probed(cluster: Cluster, probers: Mapping[str, Prober], targets: Mapping[str, Target]) -> dict[str, dict[str, str]]:
    """By name of the prober and of the target: "open", "shut" or the error. From bash UDP is not asked."""
    with ThreadPoolExecutor(len(probers)) as pool:
        asked = {name: pool.submit(_probed, cluster, prober, targets) for name, prober in probers.items()}
        return {name: found.result() for name, found in asked.items()}


def _probed(cluster: Cluster, prober: Prober, targets: Mapping[str, Target]) -> dict[str, str]:
    if prober.shell == "python":
        listed = [[each.protocol, each.address, each.port] for each in targets.values()]
        output = _exec(cluster, prober, ["python3", "-c", PYTHON, json.dumps([PROBE_SECONDS, listed])])
        return dict(zip(targets, json.loads(output), strict=True))
    names = [name for name, each in targets.items() if each.protocol == "tcp"]
    words = [f"{targets[name].address}/{targets[name].port}" for name in names]
    output = _exec(cluster, prober, ["bash", "-c", BASH.format(seconds=PROBE_SECONDS), "probe", *words])
    return {names[int(number)]: state for number, state in (line.split() for line in output.splitlines())}


def _exec(cluster: Cluster, prober: Prober, words: Sequence[str]) -> str:
    command = [str(cluster.kubectl), "--kubeconfig", str(cluster.kubeconfig), "-n", prober.namespace]
    done = subprocess.run(
        [*command, "exec", prober.pod, "--", *words],
        capture_output=True,
        text=True,
        timeout=EXEC_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{prober}: {done.stderr}"
    return done.stdout
