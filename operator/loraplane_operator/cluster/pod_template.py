"""A pool's `podTemplate`: a merge patch over the engines' pod, and what it may not ask for.

Lists of named things (containers, volumes, env, mounts) merge by their name, as in `kubectl patch`; other
lists are replaced. The rules are those of the "restricted" Pod Security Standard, and they are checked on the
merged pod, not on the patch, so that nothing comes in sideways. Pure functions.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, get_args

from loraplane_core.errors import Forbidden, InvalidParameter

#: What a platform may allow by `--allow-pod-template`.
Allowance = Literal["service-account", "secrets", "host-path", "host-namespaces", "privilege"]
ALLOWANCES: tuple[str, ...] = get_args(Allowance)

_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
    "ports": "name",
}
#: Volume types that cannot reach the host or another's credentials.
_PLAIN_VOLUMES = frozenset({"configMap", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected"})
_PLAIN_SOURCES = frozenset({"configMap", "downwardAPI"})
_TOP = frozenset({"metadata", "spec"})
_META = frozenset({"labels", "annotations"})
#: By these the release's own Services and NetworkPolicies find their pods: with them an engine would be given a
#: gateway's requests, and reach what a gateway may.
_SELECTED_BY = frozenset(f"app.kubernetes.io/{name}" for name in ("name", "instance", "component"))


def merged(template: Mapping[str, Any], patch_json: str, allowed: frozenset[str]) -> dict[str, Any]:
    """`template` with the patch applied. Raises InvalidParameter or Forbidden (code `pod_template_not_allowed`).

    Labels and annotations that `template` sets are the operator's and stay.
    """
    patch = json.loads(patch_json) if patch_json else {}
    if not isinstance(patch, dict):
        raise InvalidParameter("spec.podTemplate must be an object", param="spec.podTemplate")
    if unknown := sorted(patch.keys() - _TOP) or sorted(_mapping(patch, "metadata").keys() - _META):
        raise _refused(f"`{unknown[0]}`: only metadata.labels, metadata.annotations and spec may be set")
    if taken := sorted(_mapping(_mapping(patch, "metadata"), "labels").keys() & _SELECTED_BY):
        raise _refused(f"metadata.labels[{taken[0]}] may not be set: Services and NetworkPolicies go by it")
    result: dict[str, Any] = _merge(template, patch)
    metadata = dict(_mapping(result, "metadata"))
    own = _mapping(template, "metadata")
    result["metadata"] = {**metadata, **{name: {**_mapping(metadata, name), **_mapping(own, name)} for name in _META}}
    asked = [*_annotated(result["metadata"]["annotations"]), *_asked(_mapping(result, "spec"), template["spec"])]
    problems = [text for needed, text in asked if needed not in allowed]
    if problems:
        raise _refused("; ".join(problems))
    return result


def _refused(text: str) -> Forbidden:
    return Forbidden(f"spec.podTemplate: {text}", param="spec.podTemplate", code="pod_template_not_allowed")


def _mapping(owner: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = owner.get(key)
    if found is not None and not isinstance(found, Mapping):
        raise InvalidParameter(f"spec.podTemplate: `{key}` must be an object", param="spec.podTemplate")
    return found or {}


def _mappings(owner: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    found = owner.get(key)
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(each, Mapping) for each in found):
        raise InvalidParameter(f"spec.podTemplate: `{key}` must be a list of objects", param="spec.podTemplate")
    return found


def _name(named: Mapping[str, Any]) -> str:
    found = named.get("name")
    if not isinstance(found, str):
        raise InvalidParameter("spec.podTemplate: a `name` is missing or no text", param="spec.podTemplate")
    return found


def _merge(base: Any, patch: Any, field: str = "") -> Any:
    if isinstance(base, Mapping) and isinstance(patch, Mapping):
        kept = {key: value for key, value in base.items() if key not in patch}
        changed = {key: _merge(base.get(key), value, key) for key, value in patch.items() if value is not None}
        return {**kept, **changed}
    if isinstance(patch, Mapping):
        return {key: _merge(None, value, key) for key, value in patch.items() if value is not None}
    if isinstance(base, list) and isinstance(patch, list) and field in _MERGE_KEYS:
        return _merge_named(base, patch, _MERGE_KEYS[field])
    return patch


def _merge_named(base: list[Any], patch: list[Any], key: str) -> list[Any]:
    if not all(isinstance(each, Mapping) and isinstance(each.get(key), str) for each in patch):
        raise InvalidParameter(f"spec.podTemplate: a list whose items have a `{key}` holds another value")
    asked = {each[key]: each for each in patch}
    known = {each[key] for each in base}
    result = [_merge(each, asked[each[key]]) if each[key] in asked else each for each in base]
    return result + [each for each in patch if each[key] not in known]


def _asked(spec: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(allowance that is needed, what for) of a merged pod; what the operator's own pod has is not asked for."""
    for name in ("serviceAccountName", "serviceAccount"):
        if spec.get(name):
            yield "service-account", f"spec.{name} may not be set"
    if spec.get("automountServiceAccountToken") is not False:
        yield "service-account", "spec.automountServiceAccountToken may not be changed"
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(name):
            yield "host-namespaces", f"spec.{name} may not be set"
    yield from _volumes(spec, own)
    yield from _pod_security(_mapping(spec, "securityContext"))
    names = [_name(each) for each in own["containers"]]
    if [name for each in _mappings(spec, "containers") if (name := _name(each)) in names] != names:
        yield "", "the engine's container may not be removed"
    for group in ("initContainers", "containers"):
        for container in _mappings(spec, group):
            where = f"{group}[{_name(container)}]"
            yield from _container(where, container)
            yield from _asked_hosts(where, container)
            if group == "containers" and _name(container) in names:
                yield from _engine(where, container)


def _annotated(annotations: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The older form of a container's AppArmor profile."""
    for name, value in annotations.items():
        if name.startswith("container.apparmor.security.beta.kubernetes.io/") and value == "unconfined":
            yield "privilege", f"metadata.annotations[{name}] may not be unconfined"


def _volumes(spec: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    known = {_name(each): each for each in own["volumes"]}
    for volume in _mappings(spec, "volumes"):
        name = _name(volume)
        if name in known:
            if volume != known[name]:
                yield "", f"volume {name} is the operator's and may not be changed"
            continue
        kinds = set(volume) - {"name"}
        sources = {kind for each in _mappings(_mapping(volume, "projected"), "sources") for kind in each}
        if "serviceAccountToken" in sources:
            yield "service-account", f"volume {name} projects a service account token"
        if "secret" in kinds | sources:
            yield "secrets", f"volume {name} is a Secret"
        other = (kinds - _PLAIN_VOLUMES - {"secret"}) | (sources - _PLAIN_SOURCES - {"secret", "serviceAccountToken"})
        if other:
            yield "host-path", f"volume {name}: {', '.join(sorted(other))} may not be used"


def _pod_security(context: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if context.get("runAsNonRoot") is not True:
        yield "privilege", "spec.securityContext.runAsNonRoot may not be changed"
    if context.get("sysctls"):
        yield "privilege", "spec.securityContext.sysctls may not be set"
    if _mapping(context, "seccompProfile").get("type") not in ("RuntimeDefault", "Localhost"):
        yield "privilege", "spec.securityContext.seccompProfile may not be taken off"
    yield from _security("spec.securityContext", context)


def _container(where: str, container: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    context = _mapping(container, "securityContext")
    if context.get("privileged"):
        yield "privilege", f"{where}.securityContext.privileged may not be set"
    if context.get("allowPrivilegeEscalation") is not False:
        yield "privilege", f"{where}.securityContext.allowPrivilegeEscalation must be false"
    capabilities = _mapping(context, "capabilities")
    if capabilities.get("add"):
        yield "privilege", f"{where}.securityContext.capabilities.add may not be set"
    if capabilities.get("drop") != ["ALL"]:
        yield "privilege", f"{where}.securityContext.capabilities.drop must be [ALL]"
    if context.get("runAsNonRoot") is False:
        yield "privilege", f"{where}.securityContext.runAsNonRoot may not be changed"
    if context.get("procMount", "Default") != "Default":
        yield "privilege", f"{where}.securityContext.procMount may not be set"
    yield from _security(f"{where}.securityContext", context)
    if any(port.get("hostPort") for port in _mappings(container, "ports")):
        yield "host-namespaces", f"{where}: a port may not have a hostPort"
    if container.get("volumeDevices"):
        yield "host-path", f"{where}.volumeDevices may not be set"
    if any("secretRef" in each for each in _mappings(container, "envFrom")) or any(
        "secretKeyRef" in _mapping(each, "valueFrom") for each in _mappings(container, "env")
    ):
        yield "secrets", f"{where}: its environment may not come from a Secret"


def _engine(where: str, container: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What others may do with a file system of their own, the engine does without."""
    if _mapping(container, "securityContext").get("readOnlyRootFilesystem") is not True:
        yield "privilege", f"{where}.securityContext.readOnlyRootFilesystem may not be changed"


def _asked_hosts(where: str, container: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Probes and hooks are asked by the kubelet, which no policy keeps from any host."""
    lifecycle = _mapping(container, "lifecycle")
    handlers = {name: _mapping(container, name) for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    handlers |= {f"lifecycle.{name}": _mapping(lifecycle, name) for name in ("postStart", "preStop")}
    for name, handler in handlers.items():
        if any(_mapping(handler, action).get("host") for action in ("httpGet", "tcpSocket")):
            yield "host-namespaces", f"{where}.{name} may not name a host"


def _security(where: str, context: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """What a pod's and a container's security context have in common."""
    if context.get("runAsUser") == 0:
        yield "privilege", f"{where}.runAsUser may not be 0"
    for name in ("seccompProfile", "appArmorProfile"):
        if _mapping(context, name).get("type") == "Unconfined":
            yield "privilege", f"{where}.{name} may not be Unconfined"
    for name in ("seLinuxOptions", "windowsOptions"):
        if context.get(name):
            yield "privilege", f"{where}.{name} may not be set"
