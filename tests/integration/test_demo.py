"""`make demo` as CI runs it."""

import subprocess
import sys

import pytest

from examples.demo_system import ROOT

DEMO_SECONDS = 180


@pytest.mark.timeout(DEMO_SECONDS + 60)
def test_the_tour_holds_within_three_minutes() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py")],
        capture_output=True,
        text=True,
        timeout=DEMO_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "The tour held" in done.stdout
