"""After all tests of the installation, whatever they did to it: none of its secrets got out."""

import pytest

from tests.cluster.node.installation import POOL, RELEASE, Served

#: Containers that write logs, and pods that have environments, over the whole story.
CONTAINERS = {"gateway", "registry", "operator", "engine", "postgres", "valkey"}
KINDS = {"Pod", "Event", "ConfigMap", "Deployment", "StatefulSet", "LoRAAdapter", "BaseModelPool"}
HELM = {f"manifest helm get {what} {RELEASE}" for what in ("manifest", "hooks", "notes", "values")}


@pytest.mark.timeout(400)
def test_no_secret_got_into_a_manifest_an_object_a_log_or_an_environment(served: Served) -> None:
    witness = served.installed.witness
    assert witness.finds() == []
    seen = witness.seen()
    assert {place.rpartition("/")[2] for place in seen if place.startswith("log of ")} >= CONTAINERS
    pods = {place.rpartition("/")[2] for place in seen if place.startswith("environment of ")}
    names = {POOL, *(f"{RELEASE}-{each}" for each in CONTAINERS - {"engine"})}
    assert {name for name in names if not any(pod.startswith(f"{name}-") for pod in pods)} == set()
    assert {place.split()[1] for place in seen if place.startswith("object ")} >= KINDS
    assert seen >= HELM
