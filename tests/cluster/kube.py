"""The Kubernetes API for tests: plain objects by path, with a kubeconfig's credentials. Sync and async."""

import ssl
import tempfile
from base64 import b64decode
from pathlib import Path
from typing import Any

import httpx
import yaml

CALL_SECONDS = 10.0
MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
POOLS = "/apis/loraplane.dev/v1alpha1/namespaces/{namespace}/basemodelpools"
ADAPTERS = "/apis/loraplane.dev/v1alpha1/namespaces/{namespace}/loraadapters"


def settings_of(kubeconfig: Path) -> dict[str, Any]:
    """Arguments of an httpx client: base_url, verify (with the client certificate), headers."""
    found = yaml.safe_load(kubeconfig.read_text())
    cluster, user = found["clusters"][0]["cluster"], found["users"][0]["user"]
    context = ssl.create_default_context(cadata=_read(cluster, "certificate-authority").decode())
    if "client-certificate" in user or "client-certificate-data" in user:
        with tempfile.TemporaryDirectory() as folder:
            files = Path(folder, "crt"), Path(folder, "key")
            for file, name in zip(files, ("client-certificate", "client-key"), strict=True):
                file.touch(0o600)
                file.write_bytes(_read(user, name))
            context.load_cert_chain(*files)
    headers = {"authorization": f"Bearer {user['token']}"} if "token" in user else {}
    return {"base_url": cluster["server"], "verify": context, "headers": headers, "trust_env": False}


def _read(section: dict[str, str], name: str) -> bytes:
    data = section.get(f"{name}-data")
    return b64decode(data) if data else Path(section[name]).read_bytes()


class Refused(Exception):
    """The API server's answer was no."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


def answer_of(response: httpx.Response) -> dict[str, Any]:
    # A log may be one JSON object a line, and is text all the same.
    is_json = response.headers.get("content-type", "").startswith("application/json")
    body: dict[str, Any] = response.json() if is_json else {"message": response.text}
    if response.status_code >= 400:
        raise Refused(response.status_code, str(body.get("message", "")))
    return body


class Kube:
    """Blocking calls, each with a deadline. Close it."""

    def __init__(self, kubeconfig: Path) -> None:
        self._http = httpx.Client(**settings_of(kubeconfig), timeout=CALL_SECONDS)

    def close(self) -> None:
        self._http.close()

    def call(self, method: str, path: str, body: Any = None, *, kind: str = "application/json") -> dict[str, Any]:
        return answer_of(self._http.request(method, path, json=body, headers={"content-type": kind}))

    def get(self, path: str) -> dict[str, Any] | None:
        """None when there is no such object."""
        try:
            return self.call("GET", path)
        except Refused as error:
            if error.status == 404:
                return None
            raise

    def items(self, path: str) -> list[dict[str, Any]]:
        return list(self.call("GET", path).get("items") or [])

    def apply(self, path: str, body: dict[str, Any], manager: str = "tests") -> dict[str, Any]:
        return self.call("PATCH", f"{path}?fieldManager={manager}&force=true", body, kind=APPLY_PATCH)

    def merge(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self.call("PATCH", path, body, kind=MERGE_PATCH)

    def delete(self, path: str) -> None:
        """What is not there is deleted."""
        try:
            self.call("DELETE", path)
        except Refused as error:
            if error.status != 404:
                raise
