"""The running cluster, the product on it for every test here, and what must hold over all of them."""

import os
from pathlib import Path

import pytest

from tests.cluster.audit import WholeRun, missing_from
from tests.cluster.fixtures import fake_system, real_system, system
from tests.cluster.install import SERVICE_ACCOUNT, role_rules
from tests.cluster.tool import STATE_VARIABLE, Cluster

__all__ = ["cluster", "fake_system", "real_system", "system"]

HERE = Path(__file__).parent
_DESELECTED = pytest.StashKey[list[pytest.Item]]()
_AUDIT = pytest.StashKey[WholeRun]()


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """The cluster in whose namespace pytest runs."""
    state = os.environ.get(STATE_VARIABLE)
    if state is None:
        pytest.fail("no cluster: use `make check-cluster`, or `python -m tests.cluster.tool run -- pytest …`")
    return Cluster(Path(state))


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        item.config.stash.setdefault(_DESELECTED, []).append(item)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """After the options had their say, so that no selection leaves the audit out."""
    state = os.environ.get(STATE_VARIABLE)
    if state is None or not any(HERE in item.path.parents for item in items):
        return
    deselected = [item for item in config.stash.get(_DESELECTED, []) if item.path.parent == HERE]
    apart = [item for item in deselected if item.get_closest_marker("slow")]
    left_out = [item.nodeid for item in deselected if item not in apart]
    audit = WholeRun.from_parent(session, name="least privilege over the whole run", nodeid="tests/cluster::audit")
    audit.left_out = missing_from(HERE, [item.path for item in (*items, *apart)], left_out, config.args)
    audit.audit_log, audit.account, audit.rules = Cluster(Path(state)).audit_log, SERVICE_ACCOUNT, role_rules()
    audit.beside = role_rules("operator-home-rules")  # of an operator in a pod, which the tests of pods have
    config.stash[_AUDIT] = audit
    items.append(audit)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    audit = config.stash.get(_AUDIT, None)
    if audit is not None and audit.left_out:
        left = audit.left_out if len(audit.left_out) < 300 else f"{audit.left_out[:300]}…"
        terminalreporter.line(f"least privilege: whether the Role holds unused rights was not judged without {left}")
