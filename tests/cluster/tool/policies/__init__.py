"""Enforces NetworkPolicies on the node, which nothing else there does: a process of the tool that keeps nftables.

`python -m tests.cluster.tool.policies KUBECONFIG STATUS` is it. It writes to STATUS the versions of the objects after
whose rules it goes; `in_force` compares. When it ends, its rules stay and judge on: who was shut out stays so. They go
with the network namespace of the cluster.

A new pod is judged from the moment that the API server knows its address, some tenths of a second after its start.
"""

from tests.cluster.tool.policies.rules import TABLE, render
from tests.cluster.tool.policies.status import COLLECTIONS, in_force, versions

__all__ = ["COLLECTIONS", "TABLE", "in_force", "render", "versions"]
