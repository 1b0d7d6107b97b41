"""What an API server's answers are read as."""

import pytest

from loraplane_core.errors import NotFound
from loraplane_operator.cluster.kube_api import _read


def test_a_kind_that_is_not_served_names_what_is_missing() -> None:
    """As kube-apiserver answers for a group that it does not know."""
    with pytest.raises(NotFound, match="are the CRDs there"):
        _read(404, b"404 page not found\n")
    with pytest.raises(NotFound, match='404: pods "x" not found'):
        _read(404, b'{"kind": "Status", "message": "pods \\"x\\" not found"}')
