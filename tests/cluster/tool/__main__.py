"""The command line: run, up, down, shell, why-not (see CONTRIBUTING.md)."""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from loraplane_core.process import die_with_parent
from tests.cluster.tool.cluster import DEFAULT_NAME, Cluster
from tests.cluster.tool.errors import ClusterError
from tests.cluster.tool.leftovers import STATE_VARIABLE, state_folder
from tests.cluster.tool.packages import install

_COMMANDS = ("go", "ip", "nsenter", "openssl", "setpriv")


def why_not() -> str | None:
    """Why no cluster can run here; None when one can."""
    if sys.platform != "linux":
        return "they need Linux"
    if os.geteuid() != 0:
        return "they need root, for network namespaces"
    missing = [name for name in _COMMANDS if shutil.which(name) is None]
    return f"not on the PATH: {', '.join(missing)}" if missing else None


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.command == "why-not":
        print(why_not() or "", end="")
        return 0
    reason = why_not()
    if reason is not None:
        print(f"no cluster here: {reason}", file=sys.stderr)
        return 1
    cluster = Cluster(state_folder(options.name), options.level)
    try:
        match options.command:
            case "run":
                return _run(cluster, options.argv)
            case "up":
                return _up(cluster)
            case "down":
                cluster.stop()
                return 0
            case _:
                return _shell(cluster)
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.tool", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    texts = {
        "run": "start a cluster, run a command in its namespace, stop the cluster; exits as the command did",
        "up": "leave a cluster running",
        "down": "stop it, and clean up after one that was interrupted",
        "shell": "a shell in the namespace of a running cluster",
        "why-not": "print why no cluster can run here, or nothing",
    }
    for name, text in texts.items():
        command = commands.add_parser(name, help=text)
        command.add_argument("--name", default=DEFAULT_NAME, type=_name, help="clusters of several names run at once")
        command.add_argument("--level", choices=("api", "node"), default="api", help="node: with real pods")
        if name == "run":
            command.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    return parser


def _name(text: str) -> str:
    """It becomes the name of a folder, of a namespace and of cgroups."""
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?", text):
        raise argparse.ArgumentTypeError("up to 32 lower-case letters, digits and inner hyphens")
    return text


def _run(cluster: Cluster, argv: list[str]) -> int:
    command = argv[1:] if argv[:1] == ["--"] else argv
    if not command:
        raise ClusterError("run needs a command after --")
    cluster.claim()
    with _signals_raise():
        try:
            _start(cluster, bound=True)
            code = _in_namespace(cluster, command)
            if code != 0:
                print(f"logs of the cluster: {cluster.keep_logs()}", file=sys.stderr)
            return code
        except Ended as ended:
            return 128 + ended.signum
        finally:
            with _signals_wait():
                cluster.stop()


def _up(cluster: Cluster) -> int:
    cluster.claim()
    with _signals_raise():
        try:
            _start(cluster, bound=False)
        except BaseException as error:
            with _signals_wait():
                cluster.stop()
            if isinstance(error, Ended):
                return 128 + error.signum
            raise
    print(f"export KUBECONFIG={cluster.kubeconfig} {STATE_VARIABLE}={cluster.state}")
    print(f"nsenter --net={cluster.network.path} {cluster.kubectl} get namespaces   # every client runs like this")
    return 0


def _start(cluster: Cluster, *, bound: bool) -> None:
    if cluster.level == "node":
        install()
    cluster.start(bound=bound)


def _shell(cluster: Cluster) -> int:
    if not cluster.running():
        raise ClusterError(f"cluster {cluster.name} does not run: `make cluster-up` starts it")
    return _in_namespace(cluster, [os.environ.get("SHELL", "/bin/sh")])


def _in_namespace(cluster: Cluster, command: list[str]) -> int:
    """Its exit status, as a shell gives it; signals that come meanwhile go to it."""
    environment = {
        **os.environ,
        "KUBECONFIG": str(cluster.kubeconfig),
        STATE_VARIABLE: str(cluster.state),
        "PATH": f"{cluster.kubectl.parent}:{os.environ.get('PATH', os.defpath)}",
    }
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []  # came while it was being started

    def pass_on(signum: int, _: FrameType | None) -> None:
        if signum == signal.SIGINT and _on_terminal():
            return  # the terminal has told it already
        if child is None:
            early.append(signum)
        else:
            child.send_signal(signum)

    with _handled(pass_on):
        with cluster.network.entered():
            child = subprocess.Popen(command, env=environment, preexec_fn=die_with_parent(signal.SIGTERM))  # noqa: PLW1509
        for signum in early:
            child.send_signal(signum)
        code = child.wait()
    return code if code >= 0 else 128 - code


def _on_terminal() -> bool:
    return sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()


class Ended(BaseException):
    """A signal asked this process to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


@contextlib.contextmanager
def _handled(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _signals_raise() -> contextlib.AbstractContextManager[None]:
    def end(signum: int, frame: FrameType | None) -> None:
        raise Ended(signum)

    return _handled(end)


def _signals_wait() -> contextlib.AbstractContextManager[None]:
    """A clean-up that is interrupted would leave things behind; it has deadlines of its own."""
    return _handled(signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main())
