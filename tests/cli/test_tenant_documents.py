"""Tenant documents against a registry mocked at the HTTP level: keys kept, made anew, and troubles outlived."""

import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplane_cli.supervisor import tenants
from loraplane_cli.supervisor.tenants import TenantDocuments

DOCUMENT = """
apiVersion: loraplane.dev/v1alpha1
kind: Tenant
metadata: {name: acme}
spec: {namespaces: [%s]}
"""


class Registry:
    def __init__(self) -> None:
        self.keys: list[dict[str, Any]] = []
        self.tenants: list[dict[str, Any]] = []
        self.down = False

    def handle(self, request: httpx.Request) -> httpx.Response:
        if self.down:
            return httpx.Response(503, json={"error": {"code": "unavailable", "message": "the database is down"}})
        if request.url.path == "/admin/tenants":
            self.tenants.append(json.loads(request.content))
            return httpx.Response(200, json={})
        if request.method == "GET":
            return httpx.Response(200, json={"keys": self.keys})
        key = {"id": f"k{len(self.keys)}", "tenant": "acme", "name": "", "scopes": ["inference"], "created_at": ""}
        self.keys.append(key)
        return httpx.Response(201, json={"key": key, "secret": f"secret {key['id']}"})


@pytest.fixture
def registry() -> Registry:
    return Registry()


def watcher(registry: Registry, base: Path) -> TenantDocuments:
    for name in ("objects", "keys"):
        (base / name).mkdir(exist_ok=True)
    client = httpx.AsyncClient(transport=httpx.MockTransport(registry.handle), base_url="http://registry.test")
    return TenantDocuments(base / "objects", base / "keys", client, lambda keys: None)


def write(base: Path, namespaces: str = "default") -> Path:
    (base / "objects").mkdir(exist_ok=True)
    path = base / "objects" / "acme.yaml"
    path.write_text(DOCUMENT % namespaces)
    return path


async def test_a_key_is_made_once_and_kept_over_restarts(registry: Registry, tmp_path: Path) -> None:
    write(tmp_path)
    for _ in range(2):
        documents = watcher(registry, tmp_path)
        await documents.step()
        assert documents.keys == {"acme": "secret k0"}
    assert len(registry.keys) == 1
    assert (tmp_path / "keys" / "acme.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("lost", ["revoked", "forgotten", "garbled"])
async def test_a_key_that_the_registry_no_longer_takes_is_made_anew(
    registry: Registry, tmp_path: Path, lost: str
) -> None:
    write(tmp_path)
    await watcher(registry, tmp_path).step()
    if lost == "revoked":
        registry.keys[0]["revoked_at"] = "now"
    elif lost == "forgotten":
        registry.keys[0]["id"] = "another"
    else:
        (tmp_path / "keys" / "acme.json").write_text("{")
    documents = watcher(registry, tmp_path)
    await documents.step()
    assert documents.keys == {"acme": "secret k1"}


async def test_an_edit_changes_the_namespaces_and_an_untouched_folder_asks_nobody(
    registry: Registry, tmp_path: Path
) -> None:
    write(tmp_path)
    documents = watcher(registry, tmp_path)
    await documents.step()
    await documents.step()
    assert registry.tenants == [{"name": "acme", "namespaces": ["default"]}]
    write(tmp_path, "default, other")
    await documents.step()
    assert registry.tenants[1:] == [{"name": "acme", "namespaces": ["default", "other"]}]


async def test_a_registry_that_is_down_is_asked_again_and_told_of_once(
    registry: Registry, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path)
    registry.down = True
    documents = watcher(registry, tmp_path)
    for _ in range(3):
        await documents.step()
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "tenants: the database is down"
    ]
    registry.down = False
    await documents.step()
    assert documents.keys == {"acme": "secret k0"}


async def test_a_removed_document_leaves_its_tenant_and_says_so(
    registry: Registry, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path)
    documents = watcher(registry, tmp_path)
    await documents.step()
    path.unlink()
    await documents.step()
    assert "the tenant stays" in caplog.text
    assert len(registry.tenants) == 1


@pytest.mark.parametrize("text", ["[" * 20_000, "a: !!bool x", "a: &a [*a]", "kind: [x]\n", "\xff"])
async def test_a_file_that_cannot_be_read_hides_no_other_and_ends_nothing(
    registry: Registry, tmp_path: Path, text: str
) -> None:
    (write(tmp_path).parent / "a.yaml").write_text(text, encoding="latin-1")
    documents = watcher(registry, tmp_path)
    await documents.step()
    assert documents.keys == {"acme": "secret k0"}


async def test_a_defect_met_in_a_document_is_logged_and_the_watch_goes_on(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The watch runs inside the supervisor: what it raises would stop every process."""

    def broken(_: Path) -> dict[str, list[str]]:
        raise RuntimeError("a defect")

    write(tmp_path)
    documents = watcher(registry, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(tenants, "read_tenants", broken)
        await documents.step()
        await documents.step()
    assert [record.getMessage() for record in caplog.records if record.exc_info] == ["tenants: a defect"]
    await documents.step()
    assert documents.keys == {"acme": "secret k0"}
