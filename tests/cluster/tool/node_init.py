"""First process of the node's pid namespace: mounts, starts, reaps. When it ends, everything in there ends.

Run as a file, with nothing but the standard library: `node_init.py PLAN`, PLAN as node.write_configuration makes it.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

SOCKET_SECONDS = 30.0
#: Fixed paths of containerd, the CNI plugins and the kubelet: empty here, and gone with the mount namespace.
PRIVATE = ("/run", "/var/lib/cni", "/var/log/containers", "/var/lib/kubelet")


def main(plan_file: str) -> int:
    plan = json.loads(Path(plan_file).read_text())
    for path in PRIVATE:
        Path(path).mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", path], check=True)
        subprocess.run(["mount", "--make-rshared", path], check=True)
    Path("/run/netns").mkdir()
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    logs, commands = Path(plan["logs"]), plan["commands"]
    children = {_start(logs, "containerd", commands["containerd"]): "containerd"}
    _until_exists(Path(plan["socket"]))
    for name in ("kubelet", "kube-proxy"):
        children[_start(logs, name, commands[name])] = name
    while True:
        pid, status = os.wait()  # also of pods' processes that lost their parent
        if pid in children:
            print(f"{children[pid]} ended with {os.waitstatus_to_exitcode(status)}; so does the node", flush=True)
            return 1


def _start(logs: Path, name: str, command: list[str]) -> int:
    with (logs / f"{name}.log").open("ab") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log).pid


def _until_exists(socket: Path) -> None:
    deadline = time.monotonic() + SOCKET_SECONDS
    while not socket.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {socket} after {SOCKET_SECONDS:.0f} s; see containerd.log")
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
