"""What a cluster of that name has left on this machine; nothing after a stop."""

from pathlib import Path

from tests.cluster.tool.network import Network
from tests.cluster.tool.processes import ancestors, start_time

BASE = Path("/var/tmp/loraplane-cluster")
STATE_VARIABLE = "LORAPLANE_CLUSTER_STATE"


def state_folder(name: str) -> Path:
    return BASE / name


def leftovers(name: str) -> list[str]:
    """One line for each process, mount, namespace, cgroup and folder; links and nft tables lie in the namespace."""
    state, network = state_folder(name), Network(name)
    found = [f"process {pid}: {_command(pid)}" for pid in sorted(processes_of(state, network))]
    found += [f"mount {path}" for path in mounts_under(state)]
    found += [f"network namespace {network.path}"] if network.exists() else []
    found += [f"cgroup {path}" for path in cgroups(name)]
    found += [f"folder {state}"] if state.exists() else []
    return found


def processes_of(state: Path, network: Network) -> set[int]:
    """Those in the namespace and those that were started with this state, without this one and those above it."""
    marker = f"{STATE_VARIABLE}={state}".encode()
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    marked = {pid for pid in pids if marker in _environment(pid)}
    alive = {pid for pid in marked | network.processes() if start_time(pid) is not None}
    return alive - ancestors()


def mounts_under(folder: Path) -> list[str]:
    """Deepest first. A path in the table has its spaces and such as octal escapes."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    points = (line.split()[1].encode().decode("unicode_escape") for line in lines)
    return sorted((point for point in points if point.startswith(f"{folder}/")), reverse=True)


def cgroups(name: str) -> list[Path]:
    root = Path("/sys/fs/cgroup")
    roots = [root, *(path for path in root.iterdir() if path.is_dir())] if root.exists() else []
    return [path for path in (base / f"lpc-{name}" for base in roots) if path.is_dir()]


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "(ended)"
