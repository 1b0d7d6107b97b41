"""Uploads: resumable by offset, bounded, one tenant's only."""

from collections.abc import AsyncIterator
from pathlib import Path

import psycopg
import pytest

from loraplane_gateway.registry.main import tidy
from loraplane_gateway.registry.state import RegistryState
from loraplane_gateway.settings import RegistrySettings
from tests.gateway.artifacts import write_adapter
from tests.gateway.postgres import Database
from tests.gateway.registry.conftest import Api, settings_for

UPLOADS = "/admin/tenants/acme/uploads"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture
def settings(database: Database, tmp_path: Path) -> RegistrySettings:
    return settings_for(database, tmp_path / "registry", max_artifact=64 << 10, max_uploads=2)


@pytest.fixture
async def files(api: Api, ingesting: None, tmp_path: Path) -> dict[str, bytes]:
    await api.tenant("acme")
    await api.tenant("rival")
    await api.pool()
    folder = write_adapter(tmp_path / "local")
    return {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)}


async def _put(api: Api, upload: str, name: str, body: bytes, offset: int = 0, *, status: int = 200) -> str:
    answer = await api.call(
        "PUT", f"{UPLOADS}/{upload}/files/{name}", content=body, headers={"upload-offset": str(offset)}
    )
    assert answer.status_code == status, answer.text
    return "" if status == 200 else str(answer.json()["error"]["code"])


async def test_an_upload_resumes_where_it_stopped_and_becomes_a_version(api: Api, files: dict[str, bytes]) -> None:
    upload = (await api.ok("POST", UPLOADS))["id"]
    await _put(api, upload, CONFIG, files[CONFIG])
    url = "/admin/tenants/acme/adapters/mine/versions?wait=20"
    body = {"source": {"uri": f"upload:{upload}"}}
    await api.refused(400, "missing_file", "POST", url, body)
    await _put(api, upload, WEIGHTS, files[WEIGHTS][:100])
    assert await _put(api, upload, WEIGHTS, files[WEIGHTS][50:], 50, status=409) == "offset_mismatch"
    received = (await api.ok("GET", f"{UPLOADS}/{upload}"))["files"]
    assert received == [{"name": CONFIG, "received": len(files[CONFIG])}, {"name": WEIGHTS, "received": 100}]
    await _put(api, upload, WEIGHTS, files[WEIGHTS][100:], 100)
    version = await api.ok("POST", url, body)
    assert (version["state"], version["is_active"], version["path"]) == ("validated", True, f"upload:{upload}")


async def test_what_arrived_before_a_broken_body_is_kept(
    api: Api, files: dict[str, bytes], state: RegistryState
) -> None:
    upload = (await api.ok("POST", UPLOADS))["id"]

    async def broken() -> AsyncIterator[bytes]:
        yield files[WEIGHTS][:64]
        raise ConnectionError("the client went away")

    with pytest.raises(ConnectionError):
        await state.uploads.append("acme", upload, WEIGHTS, 0, broken())
    await _put(api, upload, WEIGHTS, files[WEIGHTS][64:], 64)


async def test_an_upload_is_bounded_and_takes_the_two_files_only(api: Api, files: dict[str, bytes]) -> None:
    upload = (await api.ok("POST", UPLOADS))["id"]
    assert await _put(api, upload, WEIGHTS, b"x" * (65 << 10), status=413) == "body_too_large"
    assert await _put(api, upload, "adapter_model.bin", b"x", status=400) == "invalid_parameter"
    assert await _put(api, upload, "..%2F..%2Fx", b"x", status=404) == "not_found"
    assert await _put(api, "../../x", CONFIG, b"x", status=404) == "not_found"
    assert await _put(api, "0" * 32, CONFIG, b"x", status=404) == "not_found"
    assert await _put(api, upload, CONFIG, b"x", -1, status=400) == "invalid_parameter"
    await api.ok("POST", UPLOADS)
    await api.refused(429, "too_many_uploads", "POST", UPLOADS)


async def test_an_upload_belongs_to_its_tenant(api: Api, files: dict[str, bytes]) -> None:
    upload = (await api.ok("POST", UPLOADS))["id"]
    for name, content in files.items():
        await _put(api, upload, name, content)
    await api.refused(404, "not_found", "GET", f"/admin/tenants/rival/uploads/{upload}")
    body = {"source": {"uri": f"upload:{upload}"}}
    await api.refused(404, "not_found", "POST", "/admin/tenants/rival/adapters/mine/versions", body)
    made = await api.ok("POST", "/admin/tenants/acme/keys", {"scopes": ["admin"]})
    version = await api.ok("POST", "/admin/tenants/acme/adapters/mine/versions?wait=20", body, token=made["secret"])
    assert version["state"] == "validated"


async def test_an_upload_past_its_time_is_gone_unless_an_ingestion_waits_for_it(
    api: Api, files: dict[str, bytes], state: RegistryState, database: Database
) -> None:
    kept, gone = [(await api.ok("POST", UPLOADS))["id"] for _ in range(2)]
    with psycopg.connect(database.owner_url) as owner:
        owner.execute("INSERT INTO tenant_adapters (tenant_id, version, state) VALUES ('acme', 1, 'pending_base')")
        owner.execute(
            "INSERT INTO ingestions (tenant_id, adapter, version, source) VALUES ('acme', 'default', 1, %s)",
            (f"upload:{kept}",),
        )
        owner.execute("UPDATE uploads SET expires_at = now() - interval '1 second'")
    await tidy(state)
    assert [folder.name for folder in (state.settings.store_dir / ".uploads/acme").iterdir()] == [kept]
    await api.refused(404, "not_found", "GET", f"{UPLOADS}/{gone}")
