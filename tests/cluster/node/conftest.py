"""What the tests with real pods have in common."""

import contextlib
from collections.abc import Iterator

import pytest

from tests.cluster.kube import Kube
from tests.cluster.node.installation import installed, served
from tests.cluster.tool import Cluster

__all__ = ["installed", "kube", "served"]


@pytest.fixture
def kube(cluster: Cluster) -> Iterator[Kube]:
    with contextlib.closing(Kube(cluster.kubeconfig)) as admin:
        yield admin
