"""What the tests with real pods have in common."""

from tests.cluster.node.installation import installed, served

__all__ = ["installed", "served"]
