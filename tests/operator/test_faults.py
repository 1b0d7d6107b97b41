"""The points at which a test can kill the operator."""

import subprocess
import sys

import pytest

from loraplane_operator import faults

PROGRAM = """
import sys
from loraplane_operator import faults
fault = faults.from_environment({faults.VARIABLE: sys.argv[1]})
for number in range(3):
    fault("after/plan")
    print(number, flush=True)
"""


def test_there_are_enough_points_and_each_is_named_once() -> None:
    names = faults.points()
    assert len(names) >= 30
    assert len(set(names)) == len(names)
    assert {"after/observe", "after/plan", "before/SetStatus", "after/SetFinalizer", "after/Warm"} <= set(names)


@pytest.mark.parametrize("asked", ["after/lunch", "after/plan:x", ":1"])
def test_point_that_does_not_exist_is_refused(asked: str) -> None:
    with pytest.raises(ValueError, match="points are after/observe"):
        faults.from_environment({faults.VARIABLE: asked})


def test_without_the_variable_nothing_is_armed() -> None:
    fault = faults.from_environment({})
    for point in faults.points():
        fault(point)


@pytest.mark.parametrize(
    ("asked", "told"), [("after/plan", ""), ("after/plan:3", "0\n1\n"), ("before/Warm", "0\n1\n2\n")]
)
def test_process_is_killed_the_nth_time_it_comes_by(asked: str, told: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, asked], check=False, capture_output=True, text=True, timeout=20
    )
    assert done.stdout == told
    assert done.returncode == (0 if asked == "before/Warm" else -9)
