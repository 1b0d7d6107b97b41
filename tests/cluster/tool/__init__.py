"""A throw-away Kubernetes control plane for tests, in a network namespace of its own (ADR 0013)."""

from tests.cluster.tool.cluster import DEFAULT_NAME, Cluster
from tests.cluster.tool.errors import ClusterError
from tests.cluster.tool.leftovers import STATE_VARIABLE, leftovers

__all__ = ["DEFAULT_NAME", "STATE_VARIABLE", "Cluster", "ClusterError", "leftovers"]
