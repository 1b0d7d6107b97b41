"""The enforcer's process: a thread follows each collection, and one loop makes rules of what they hold."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from tests.cluster.kube import CALL_SECONDS, Refused, answer_of, settings_of
from tests.cluster.tool.policies.rules import Object, render
from tests.cluster.tool.policies.status import COLLECTIONS, write

RETRY_SECONDS = 0.5
WATCH_SECONDS = 60
_NFT_SECONDS = 10.0


class Mirror:
    """The objects of a collection, kept up by a thread of its own; `changed` is set with every change."""

    def __init__(self, kubeconfig: Path, path: str, changed: threading.Event) -> None:
        self._path = path
        self._changed = changed
        self._lock = threading.Lock()
        self._objects: dict[str, Object] | None = None
        reading = httpx.Timeout(CALL_SECONDS, read=WATCH_SECONDS + CALL_SECONDS)
        self._http = httpx.Client(**settings_of(kubeconfig), timeout=reading)
        threading.Thread(target=self._run, name=path, daemon=True).start()

    def objects(self) -> list[Object] | None:
        """None until they were listed once."""
        with self._lock:
            return None if self._objects is None else list(self._objects.values())

    def _run(self) -> None:
        while True:
            try:
                self._watch(self._list())
            except (httpx.HTTPError, Refused, ValueError) as error:
                say(f"{self._path}: {error!r}")
            time.sleep(RETRY_SECONDS)

    def _list(self) -> str:
        """Its resourceVersion."""
        found = answer_of(self._http.get(self._path))
        with self._lock:
            self._objects = {each["metadata"]["uid"]: each for each in found["items"]}
        self._changed.set()
        return str(found["metadata"]["resourceVersion"])

    def _watch(self, version: str) -> None:
        """Until the API server no longer knows what came after the version."""
        while True:
            began = time.monotonic()
            query = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_SECONDS)}
            with self._http.stream("GET", self._path, params={**query, "resourceVersion": version}) as response:
                if response.is_error:
                    response.read()
                    answer_of(response)
                for line in response.iter_lines():
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        return
                    version = event["object"]["metadata"]["resourceVersion"]
                    self._take(event)
            if time.monotonic() - began < RETRY_SECONDS:
                return

    def _take(self, event: dict[str, Any]) -> None:
        if event["type"] == "BOOKMARK":
            return
        uid = event["object"]["metadata"]["uid"]
        with self._lock:
            assert self._objects is not None
            if event["type"] == "DELETED":
                self._objects.pop(uid, None)
            else:
                self._objects[uid] = event["object"]
        self._changed.set()


def main(kubeconfig: Path, status: Path) -> None:
    """Until it is killed."""
    changed = threading.Event()
    mirrors = {name: Mirror(kubeconfig, path, changed) for name, path in COLLECTIONS.items()}
    in_force = ""
    while True:
        changed.wait()
        changed.clear()
        found = {name: objects for name, mirror in mirrors.items() if (objects := mirror.objects()) is not None}
        if len(found) < len(mirrors):
            continue
        try:
            rules = render(**found)
            if rules != in_force:
                apply(rules)
                in_force = rules
        except (ValueError, KeyError, OSError, subprocess.SubprocessError) as error:
            say(f"the rules before stay: {error!r}")
            time.sleep(RETRY_SECONDS)
            changed.set()
            continue
        write(status, found)


def apply(rules: str) -> None:
    done = subprocess.run(
        ["nft", "-f", "-"], input=rules, capture_output=True, text=True, timeout=_NFT_SECONDS, check=False
    )
    if done.returncode != 0:
        raise ValueError(f"nft refuses the rules: {done.stderr[-2000:]}\n{rules}")


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
