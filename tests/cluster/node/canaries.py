"""Whether a secret of an installation has got out: into a manifest, an object, a log, an event or an environment.

    with Witness(cluster, [namespace], releases=[(RELEASE, namespace)]) as witness:
        ...                                  # the story: install, keys, requests, kills, upgrades
        witness.add("acme's key", key)       # what no Secret of the namespaces holds
        witness.look()                       # before the uninstall: objects and manifests as they are now
        ...
        assert witness.finds() == []         # looks once more; also tells what was seen

Every Secret of the namespaces is a canary, whatever wrote it and however short it lived.
"""

import contextlib
import json
import os
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from tests.charts.helm import HelmFailed, helm
from tests.cluster.kube import Kube, Refused
from tests.cluster.leaks import Find, Hunt, without_secrets
from tests.cluster.tool import Cluster

GLANCE_SECONDS = 0.5
STOP_SECONDS = 20.0
#: Holds the manifests of a release, packed: no canary, and it has all of them.
_NOT_HELM = "?fieldSelector=type!=helm.sh/release.v1"
_HELM_GETS = ("manifest", "hooks", "notes", "values")
_POD_OF_GROUP = re.compile(r"/pod([0-9a-f-]{36})/")


class Witness:
    """Beside a story a thread keeps what would be gone at its end: logs of removed containers, environments and
    command lines of ended processes, values of replaced Secrets.

    A container that lives for less than half a second can escape it. Use it in a `with`, on the level "node".
    """

    def __init__(self, cluster: Cluster, namespaces: Sequence[str], releases: Sequence[tuple[str, str]] = ()) -> None:
        self._cluster = cluster
        self._namespaces = tuple(namespaces)
        self._releases = tuple(releases)
        self._kube = Kube(cluster.kubeconfig)
        self._hunt = Hunt()
        self._secrets: dict[str, Any] = {}
        self._texts: dict[str, set[str]] = {}  # by place
        self._logs: dict[tuple[int, int], tuple[str, int]] = {}  # by device and inode: place and open file
        self._seen: dict[str, int] = {}
        self._failure: BaseException | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="witness", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stop()
        for _place, descriptor in self._logs.values():
            os.close(descriptor)
        self._kube.close()

    def add(self, name: str, secret: str) -> None:
        self._hunt.add(name, secret.encode())

    def read(self, place: str, text: str) -> None:
        """Any further text in which no secret may be, such as what a command printed."""
        self._texts.setdefault(place, set()).add(text)

    def look(self) -> None:
        """Objects and manifests as they are now."""
        for namespace in self._namespaces:
            for place, text in _objects(self._kube, namespace):
                self.read(place, text)
        for release, namespace in self._releases:
            for place, text in _rendered(release, namespace, self._cluster.kubeconfig):
                self.read(place, text)

    def finds(self) -> list[Find]:
        """Sorted; empty when nothing got out. Raises what the thread failed with, and AssertionError when it saw
        nothing: then an empty list would mean nothing."""
        self.look()
        self._stop()
        self._glance()
        if self._failure is not None:
            raise self._failure
        for raw in self._secrets.values():
            self._hunt.add_secret(raw)
        texts = {place: "\n".join(found) for place, found in self._texts.items()}
        for place, descriptor in self._logs.values():
            texts[place] = texts.get(place, "") + _content(descriptor)
        kinds = {place.partition(" ")[0] for place in texts}
        missing = {"object", "log", "environment", "command"} - kinds
        assert not missing, f"nothing was seen of: {', '.join(sorted(missing))}"
        assert self._secrets, "no Secret was seen"
        self._seen = {place: len(text) for place, text in texts.items()}
        return sorted(find for place, text in texts.items() for find in self._hunt.finds(place, text))

    def seen(self) -> set[str]:
        """The places in which `finds` has found some text: an empty list means nothing of any other."""
        return {place for place, characters in self._seen.items() if characters}

    def _stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS)
            assert not self._thread.is_alive(), "the witness does not end"

    def _watch(self) -> None:
        while not self._stopping.wait(GLANCE_SECONDS):
            try:
                self._glance()
            except Exception as error:  # told by `finds`
                self._failure = error
                return

    def _glance(self) -> None:
        pods = self._open_logs()
        for place, text in _processes(self._cluster.name, pods):
            self.read(place, text)
        with contextlib.suppress(httpx.TransportError, Refused):  # not now; the next glance has them
            for namespace in self._namespaces:
                for raw in self._kube.items(f"/api/v1/namespaces/{namespace}/secrets{_NOT_HELM}"):
                    self._secrets[f"{raw['metadata']['uid']}@{raw['metadata']['resourceVersion']}"] = raw

    def _open_logs(self) -> dict[str, str]:
        """Namespace/pod by uid of those that have logs. An open file stays readable when its pod is removed."""
        pods: dict[str, str] = {}
        for folder in (self._cluster.state / "pod-logs").glob("*"):
            namespace, name, uid = folder.name.split("_")
            if namespace not in self._namespaces:
                continue
            pods[uid] = f"{namespace}/{name}"
            with contextlib.suppress(FileNotFoundError):  # the pod goes at this moment
                for file in folder.glob("*/*"):
                    found = file.stat()
                    if (found.st_dev, found.st_ino) not in self._logs:
                        place = f"log of {pods[uid]}/{file.parent.name}"
                        self._logs[found.st_dev, found.st_ino] = (place, os.open(file, os.O_RDONLY))
        return pods


def _content(descriptor: int) -> str:
    """All of it. A long line that the runtime has cut keeps enough of a secret on one side of the cut."""
    with os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(0)
        return file.read().decode(errors="replace")


def _processes(cluster: str, pods: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Environment and command line of whatever runs in one of the pods, seen from the node."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            groups = (entry / "cgroup").read_text()
            match = _POD_OF_GROUP.search(groups) if f"/lpc-{cluster}/" in groups else None
            pod = pods.get(match[1]) if match else None
            if pod is None:
                continue
            what = f"of {(entry / 'comm').read_text().strip()} in {pod}"
            yield f"environment {what}", _words(entry / "environ")
            yield f"command line {what}", _words(entry / "cmdline")


def _words(file: Path) -> str:
    return file.read_bytes().replace(b"\0", b"\n").decode(errors="replace")


def _objects(kube: Kube, namespace: str) -> Iterator[tuple[str, str]]:
    """Every object of the namespace but its Secrets; Events are among them."""
    for path, kind in _listed(kube):
        try:
            items = kube.items(path.format(namespace=namespace))
        except Refused as refused:
            if refused.status not in (404, 405):  # gone meanwhile, such as a CRD; not to be listed
                raise
            continue
        for raw in items:
            yield f"object {kind} {namespace}/{raw['metadata']['name']}", json.dumps(raw, ensure_ascii=False)


def _listed(kube: Kube) -> Iterator[tuple[str, str]]:
    """Path, with its {namespace} open, and kind of every namespaced resource that can be listed."""
    groups = [each["preferredVersion"]["groupVersion"] for each in kube.call("GET", "/apis")["groups"]]
    for root in ("/api/v1", *(f"/apis/{group}" for group in groups)):
        for resource in kube.call("GET", root)["resources"]:
            listed = resource["namespaced"] and "list" in resource["verbs"]
            if listed and resource["kind"] != "Secret":
                yield f"{root}/namespaces/{{namespace}}/{resource['name']}", resource["kind"]


def _rendered(release: str, namespace: str, kubeconfig: Path) -> Iterator[tuple[str, str]]:
    """What helm keeps of a release, without the Secrets in it; nothing when there is no such release now."""
    env = {"KUBECONFIG": str(kubeconfig)}
    for what in _HELM_GETS:
        try:
            text = helm("get", what, release, "-n", namespace, env=env)
        except HelmFailed as error:
            if "release: not found" in str(error):
                return
            raise
        yield f"manifest helm get {what} {release}", without_secrets(text)
