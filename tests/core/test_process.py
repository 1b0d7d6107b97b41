"""Children do not outlive their parent."""

import os
import select
import subprocess
import sys

import pytest

from loraplane_core.process import alive

PARENT = """
import signal, subprocess, sys
from loraplane_core.process import die_with_parent
child = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"],
                         preexec_fn=die_with_parent(signal.SIGKILL), stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_a_child_dies_with_a_parent_that_was_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert alive(child)
        watched = os.pidfd_open(child)  # it is not our child, and its number may be used again
        try:
            parent.kill()
            parent.wait(timeout=10)
            ended, _, _ = select.select([watched], [], [], 10)
            assert ended
        finally:
            os.close(watched)


def test_alive_knows_ended_processes_and_those_of_others() -> None:
    assert alive(os.getpid())
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait(timeout=30)
    assert not alive(child.pid)


def test_a_process_of_another_user_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, signum: int) -> None:
        raise PermissionError(pid, signum)

    monkeypatch.setattr(os, "kill", refuse)
    assert alive(1)
