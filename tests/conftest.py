"""For all tests: torch's threads must not spin against the processes that the tests start."""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # read once, when torch loads libgomp
os.environ.setdefault("OMP_NUM_THREADS", "1")
