"""Who may do what on the admin listener, and what it answers to bad input."""

import asyncio
import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psycopg
import pytest
from redis.asyncio import Redis

from loraplane_gateway import keys
from loraplane_gateway.db.sessions import PLATFORM, Scope, transaction
from loraplane_gateway.registry.adapters.repository import AdapterRepository
from loraplane_gateway.registry.app import create_admin_app
from loraplane_gateway.registry.main import registry
from loraplane_gateway.registry.revocations import CHANNEL, Revocations
from loraplane_gateway.registry.state import RegistryState
from tests.gateway.postgres import Database, free_port
from tests.gateway.registry.conftest import ADMIN_KEY, Api, settings_for

ACME = "/admin/tenants/acme"


async def _key(api: Api, tenant: str, *scopes: str) -> tuple[str, str]:
    made = await api.ok("POST", f"/admin/tenants/{tenant}/keys", {"scopes": list(scopes)})
    return made["key"]["id"], made["secret"]


async def test_creating_a_tenant_again_gives_it_the_namespaces_of_now(api: Api) -> None:
    spec = {"name": "acme", "namespaces": ["b", "a"]}
    first = await api.call("POST", "/admin/tenants", spec)
    assert (first.status_code, first.json()["namespaces"]) == (201, ["a", "b"])
    again = await api.call("POST", "/admin/tenants", spec)
    assert (again.status_code, again.json()) == (200, first.json())
    await api.tenant("acme", "c")
    assert (await api.ok("GET", ACME))["namespaces"] == ["c"]
    assert [tenant["name"] for tenant in (await api.ok("GET", "/admin/tenants"))["tenants"]] == ["acme"]


async def test_a_deleted_tenant_takes_its_keys_along(api: Api) -> None:
    await api.tenant("acme")
    _, secret = await _key(api, "acme", "admin")
    await api.ok("DELETE", ACME)
    await api.refused(404, "tenant_unknown", "GET", ACME)
    await api.refused(401, "invalid_api_key", "GET", f"{ACME}/adapters", token=secret)


async def test_a_secret_is_shown_once_and_only_its_hmac_is_stored(
    api: Api, state: RegistryState, database: Database
) -> None:
    await api.tenant("acme")
    key_id, secret = await _key(api, "acme", "inference")
    assert keys.key_id(secret) == key_id
    assert secret not in (await api.call("GET", f"{ACME}/keys")).text
    with psycopg.connect(database.owner_url) as owner:
        stored = owner.execute("SELECT digest FROM api_keys").fetchone()
        assert stored == (keys.digest(state.secrets.pepper, secret),)
        for table in ("audit_log", "changes", "api_keys"):
            assert secret not in str(owner.execute(f"SELECT * FROM {table}").fetchall())


async def test_a_revoked_key_is_refused_and_its_id_is_announced(
    api: Api, state: RegistryState, valkey_url: str
) -> None:
    await api.tenant("acme")
    key_id, secret = await _key(api, "acme", "admin")
    await api.ok("GET", f"{ACME}/adapters", token=secret)
    async with Redis.from_url(valkey_url) as redis, redis.pubsub() as notices:
        await notices.subscribe(CHANNEL)
        assert (await notices.get_message(timeout=5))["type"] == "subscribe"
        state.revocations = Revocations(Redis.from_url(valkey_url))
        revoked = await api.ok("DELETE", f"{ACME}/keys/{key_id}")
        assert revoked["revoked_at"]
        notice = await notices.get_message(ignore_subscribe_messages=True, timeout=5)
        assert notice is not None and notice["data"] == key_id.encode()
        await state.revocations.close()
    await api.refused(401, "invalid_api_key", "GET", f"{ACME}/adapters", token=secret)
    assert (await api.ok("DELETE", f"{ACME}/keys/{key_id}"))["revoked_at"] == revoked["revoked_at"]


async def test_a_revocation_holds_when_redis_is_away(api: Api, state: RegistryState) -> None:
    await api.tenant("acme")
    key_id, _ = await _key(api, "acme", "inference")
    state.revocations = Revocations(Redis.from_url("redis://127.0.0.1:1/0", socket_connect_timeout=0.2))
    assert (await api.ok("DELETE", f"{ACME}/keys/{key_id}"))["revoked_at"]
    await state.revocations.close()


async def test_an_expired_key_is_refused(api: Api, database: Database) -> None:
    await api.tenant("acme")
    later = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)).isoformat()
    made = await api.ok("POST", f"{ACME}/keys", {"scopes": ["admin"], "expires_at": later})
    await api.ok("GET", f"{ACME}/adapters", token=made["secret"])
    with psycopg.connect(database.owner_url) as owner:
        owner.execute("UPDATE api_keys SET expires_at = now() - interval '1 second'")
    await api.refused(401, "invalid_api_key", "GET", f"{ACME}/adapters", token=made["secret"])


async def test_a_tenants_admin_key_reaches_its_own_tenant_only(api: Api) -> None:
    await api.tenant("acme")
    await api.tenant("rival")
    _, admin = await _key(api, "acme", "admin")
    _, client = await _key(api, "acme", "inference")
    await api.ok("GET", f"{ACME}/adapters", token=admin)
    for method, path, body in [
        ("GET", "/admin/tenants/rival/adapters", None),
        ("GET", "/admin/tenants/nobody/adapters", None),
        ("POST", "/admin/tenants/rival/uploads", None),
        ("GET", "/admin/tenants", None),
        ("POST", "/admin/tenants", {"name": "more"}),
        ("POST", f"{ACME}/keys", {}),
        ("GET", f"{ACME}/keys", None),
        ("DELETE", ACME, None),
        ("POST", f"{ACME}/adapters/a/versions", {"source": {"uri": "file:a"}}),
        ("POST", f"{ACME}/adapters/a/versions/1/verify", None),
        ("GET", "/operator/feed", None),
        ("GET", "/operator/claims", None),
    ]:
        answer = await api.call(method, path, body, token=admin)
        assert answer.status_code == 403, (method, path, answer.text)
        assert (await api.call(method, path, body, token=client)).status_code == 403


async def test_the_operator_reaches_neither_keys_nor_tenants_and_the_platform_no_claims(api: Api) -> None:
    await api.tenant("acme")
    for method, path in [("GET", "/admin/tenants"), ("POST", f"{ACME}/keys"), ("GET", f"{ACME}/adapters")]:
        await api.refused(403, "forbidden", method, path, {}, token=api.operator_token)
    await api.refused(403, "forbidden", "GET", "/operator/claims")
    await api.refused(403, "forbidden", "PUT", "/operator/pools/a/b", {"base_model": "x"})


@pytest.mark.parametrize("token", ["", "x", "lp_000000000000_" + "0" * 38, "platform-admin-key-of-the-tests-012345678"])
async def test_an_unknown_credential_is_401(api: Api, token: str) -> None:
    answer = await api.call("GET", "/admin/tenants", token=token)
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert (await api.http.get("/operator/feed")).status_code == 401


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code"),
    [
        ("POST", "/admin/tenants", b"{", 400, "invalid_json"),
        ("POST", "/admin/tenants", b'{"name": "a", "name": "b"}', 400, "invalid_json"),
        ("POST", "/admin/tenants", b"[]", 400, "invalid_json"),
        ("POST", "/admin/tenants", b'{"name": 1}', 400, "invalid_request"),
        ("POST", "/admin/tenants", b"{}", 400, "invalid_request"),
        ("POST", "/admin/tenants", b'{"name": "A"}', 400, "invalid_name"),
        ("POST", "/admin/tenants", b'{"name": "a", "namespaces": ["../x"]}', 400, "invalid_name"),
        ("POST", "/admin/tenants", b" " * (5 << 20), 413, "body_too_large"),
        ("PUT", "/admin/tenants", b"{}", 405, "method_not_allowed"),
        ("GET", "/admin/nothing", b"", 404, "not_found"),
        ("GET", "/admin/tenants/nobody", b"", 404, "tenant_unknown"),
        ("GET", "/admin/tenants/no%00body", b"", 400, "invalid_name"),
        ("POST", "/admin/tenants/nobody/keys", b"{}", 404, "tenant_unknown"),
        ("POST", "/admin/tenants/acme/keys", b'{"scopes": ["root"]}', 400, "invalid_request"),
        ("POST", "/admin/tenants/acme/keys", b'{"scopes": []}', 400, "invalid_parameter"),
        ("POST", "/admin/tenants/acme/keys", b'{"expires_at": "tomorrow"}', 400, "invalid_parameter"),
        ("POST", "/admin/tenants/acme/keys", b'{"expires_at": "2020-01-01T00:00:00Z"}', 400, "invalid_parameter"),
        ("DELETE", "/admin/tenants/acme/keys/none", b"", 404, "not_found"),
        ("DELETE", "/admin/tenants/acme/keys/no%00ne", b"", 400, "invalid_request"),
        ("GET", "/admin/tenants/acme/adapters/none", b"", 404, "not_found"),
        ("POST", "/admin/tenants/acme/adapters/none/activate", b'{"version": 1}', 404, "not_found"),
        ("POST", "/admin/tenants/acme/adapters/none/versions/x/verify", b"", 400, "invalid_parameter"),
        ("POST", "/admin/tenants/acme/adapters/a/versions?wait=x", b'{"source":{"uri":""}}', 400, "invalid_parameter"),
        ("POST", "/admin/tenants/acme/adapters/a/versions", b'{"source": {"uri": "upload:x"}}', 404, "not_found"),
    ],
)  # fmt: skip
async def test_bad_input_is_refused_with_a_stable_code(
    api: Api, method: str, path: str, content: bytes, status: int, code: str
) -> None:
    await api.tenant("acme")
    await api.refused(status, code, method, path, content=content)


async def test_a_repository_of_one_tenant_sees_that_tenant_only(
    api: Api, state: RegistryState, database: Database
) -> None:
    with psycopg.connect(database.owner_url) as owner:
        owner.execute("INSERT INTO tenant_adapters (tenant_id, version) VALUES ('alpha', 1), ('beta', 1)")

    async def tenants(rows: Scope, repository: Scope) -> list[str]:
        async with transaction(state.sessions, rows) as session:
            return [found.tenant for found in await AdapterRepository(session, repository).all()]

    alpha = Scope("alpha")
    assert await tenants(alpha, alpha) == ["alpha"]
    assert await tenants(PLATFORM, alpha) == ["alpha"]  # the statement's own filter
    assert await tenants(alpha, PLATFORM) == ["alpha"]  # row-level security, when a filter is forgotten
    assert await tenants(PLATFORM, PLATFORM) == ["alpha", "beta"]


async def test_answers_carry_a_request_id_and_never_the_text_of_a_defect(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = await api.call("GET", "/health/live", headers={"x-request-id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"

    async def broken(*_: Any) -> None:
        raise RuntimeError("a secret detail")

    monkeypatch.setattr("loraplane_gateway.registry.tenants.repository.TenantRepository.all", broken)
    answer = await api.call("GET", "/admin/tenants", headers={"x-request-id": "bad id\x7f"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "secret detail" not in answer.text


async def test_without_its_database_the_registry_answers_503_at_once(database: Database, tmp_path: Path) -> None:
    url = database.registry_url.replace(f":{urlsplit(database.registry_url).port}/", f":{free_port()}/")
    async with registry(settings_for(database, tmp_path / "r", database_url=url)) as state:
        transport = httpx.ASGITransport(create_admin_app(state), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://registry") as client, asyncio.timeout(10):
            for path in ("/admin/tenants", "/health/ready", "/metrics"):
                answer = await client.get(path, headers={"authorization": f"Bearer {ADMIN_KEY}"})
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "database_unavailable")
                assert answer.headers["retry-after"] == "1"
            assert (await client.get("/health/live")).status_code == 200
