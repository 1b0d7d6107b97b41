"""After all tests of the installation, whatever they did to it: none of its secrets got out."""

import pytest

from tests.cluster.node.installation import Installation


@pytest.mark.timeout(400)
def test_no_secret_got_into_a_manifest_an_object_a_log_or_an_environment(installed: Installation) -> None:
    assert installed.witness.finds() == []
