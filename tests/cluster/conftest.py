"""The running cluster, and the product on it, for every test here."""

import os
from pathlib import Path

import pytest

from tests.cluster.fixtures import fake_system, real_system, system
from tests.cluster.tool import STATE_VARIABLE, Cluster

__all__ = ["cluster", "fake_system", "real_system", "system"]


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """The cluster in whose namespace pytest runs."""
    state = os.environ.get(STATE_VARIABLE)
    if state is None:
        pytest.fail("no cluster: use `make check-cluster`, or `python -m tests.cluster.tool run -- pytest …`")
    return Cluster(Path(state))
