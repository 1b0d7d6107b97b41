"""`make cluster-up`, `cluster-shell` and `cluster-down`, typed as CONTRIBUTING.md says, on a cluster of another name
than a person's own.
"""

import os
import secrets
import subprocess
from collections.abc import Iterator

import pytest

from tests.cluster.services import ROOT
from tests.cluster.tool import Cluster, leftovers
from tests.cluster.tool.leftovers import STATE_VARIABLE, state_folder

pytestmark = pytest.mark.timeout(240)
MAKE_SECONDS = 120.0


@pytest.fixture
def name() -> Iterator[str]:
    chosen = f"make-{secrets.token_hex(3)}"
    yield chosen
    make(chosen, "cluster-down")


def shell(*command: str, said: str = "") -> subprocess.CompletedProcess[str]:
    """As in a fresh shell: neither this cluster's variables nor those of a make above us."""
    ours = {"KUBECONFIG", STATE_VARIABLE, "MAKEFLAGS", "MAKELEVEL", "MFLAGS"}
    environment = {key: value for key, value in os.environ.items() if key not in ours} | {"SHELL": "/bin/sh"}
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        input=said,
        capture_output=True,
        text=True,
        timeout=MAKE_SECONDS,
        check=False,
    )


def make(name: str, target: str, said: str = "") -> subprocess.CompletedProcess[str]:
    """The recipe's command gets the cluster's name; nothing is installed on the way."""
    script = f'exec .venv/bin/python -m tests.cluster.tool "$$1" --name {name}'
    return shell("make", "-o", ".venv/.stamp", target, f"CLUSTER=sh -c '{script}' sh", said=said)


def test_a_cluster_is_made_entered_tested_on_and_taken_down(name: str) -> None:
    up = make(name, "cluster-up")
    assert up.returncode == 0, up.stderr
    exported, client = up.stdout.splitlines()
    kubeconfig = exported.partition("KUBECONFIG=")[2].split()[0]
    assert kubeconfig == str(Cluster(state_folder(name)).kubeconfig)
    used = shell("sh", "-c", f"{exported}\n{client}")
    assert (used.returncode, "kube-system" in used.stdout) == (0, True), used.stderr

    typed = [
        'echo "$KUBECONFIG"',
        "kubectl create namespace made-by-hand -o name",
        ".venv/bin/pytest -q -p no:cacheprovider tests/cluster/test_tool.py -k a_token_is_bounded_by_its_roles",
        "exit 3",
    ]
    inside = make(name, "cluster-shell", said="\n".join(typed) + "\n")
    assert inside.stdout.splitlines()[:2] == [kubeconfig, "namespace/made-by-hand"], inside.stdout + inside.stderr
    assert " passed" in inside.stdout and " failed" not in inside.stdout, inside.stdout
    assert "Error 3" in inside.stderr  # the shell's exit status is make's to tell
    assert (
        "namespace/made-by-hand"
        in shell("sh", "-c", f"{exported}\n{client.partition(' get ')[0]} get ns -o name").stdout
    )

    down = make(name, "cluster-down")
    assert (down.returncode, leftovers(name)) == (0, []), down.stderr
    gone = make(name, "cluster-shell")
    assert gone.returncode != 0
    assert f"cluster {name} does not run: `make cluster-up` starts it" in gone.stderr


def test_down_without_a_cluster_is_no_error(name: str) -> None:
    down = make(name, "cluster-down")
    assert (down.returncode, down.stdout) == (0, ""), down.stderr
