"""What there is in the API: objects of every kind that can be listed."""

from collections.abc import Iterator, Sequence

from tests.cluster.kube import Kube, Refused

#: They go by themselves, some time.
_PASSING = frozenset({"Event"})


def inventory(kube: Kube, namespaces: Sequence[str], mark: str) -> set[str]:
    """KIND NAMESPACE/NAME of all that is in these namespaces, and KIND NAME of what is in none and has the mark in its
    name."""
    found = set()
    for path, kind, namespaced in _listed(kube):
        try:
            metadata = [raw["metadata"] for raw in kube.items(path)]
        except Refused as refused:
            if refused.status not in (404, 405):  # a kind that goes at this moment; one that cannot be listed
                raise
            continue
        for each in metadata:
            if namespaced and each["namespace"] in namespaces:
                found.add(f"{kind} {each['namespace']}/{each['name']}")
            elif not namespaced and mark in each["name"]:
                found.add(f"{kind} {each['name']}")
    return found


def _listed(kube: Kube) -> Iterator[tuple[str, str, bool]]:
    """(path over all namespaces, kind, whether it is in namespaces)."""
    groups = [each["preferredVersion"]["groupVersion"] for each in kube.call("GET", "/apis")["groups"]]
    for root in ("/api/v1", *(f"/apis/{group}" for group in groups)):
        for resource in kube.call("GET", root)["resources"]:
            if "list" in resource["verbs"] and resource["kind"] not in _PASSING:
                yield f"{root}/{resource['name']}", resource["kind"], resource["namespaced"]
