"""The artifact listener: a pool's engines fetch the bytes of their own pool's adapters, nothing else."""

import hashlib

import httpx
import pytest

from loraplane_core import headers
from loraplane_core.credentials import Role, engine_credential, role_key
from loraplane_core.identity import PoolRef
from loraplane_gateway.registry.artifacts.store import ArtifactStore
from loraplane_gateway.registry.state import RegistryState
from tests.gateway.artifacts import write_adapter
from tests.gateway.registry.conftest import Api

MINE, OTHER = PoolRef("serving", "tiny"), PoolRef("serving", "other")
WEIGHTS = "adapter_model.safetensors"


def _as(state: RegistryState, pool: PoolRef, epoch: int = 1, role: Role = "fetch", **more: str) -> dict[str, str]:
    token = engine_credential(role_key(state.secrets.master, role), pool, epoch)
    return {"authorization": f"Bearer {token}", headers.POOL: str(pool), headers.EPOCH: str(epoch), **more}


@pytest.fixture
async def digest(api: Api, ingesting: None, state: RegistryState) -> str:
    await api.tenant("acme")
    await api.pool()
    write_adapter(state.settings.adapter_root / "a")
    return (await api.register("acme", "pirate", "a")).digest


async def test_an_engine_of_the_pool_gets_both_files_with_their_length(
    digest: str, state: RegistryState, artifact_http: httpx.AsyncClient
) -> None:
    sums = {}
    for name in ("adapter_config.json", WEIGHTS):
        answer = await artifact_http.get(f"/artifacts/{digest}/{name}", headers=_as(state, MINE))
        assert answer.status_code == 200
        assert int(answer.headers["content-length"]) == len(answer.content)
        sums[name] = hashlib.sha256(answer.content).hexdigest()
    lines = "".join(f"{sums[name]}  {name}\n" for name in sorted(sums))
    assert hashlib.sha256(lines.encode()).hexdigest() == digest


async def test_another_pool_an_unknown_and_a_withdrawn_digest_get_the_same_404(
    digest: str, api: Api, state: RegistryState, artifact_http: httpx.AsyncClient
) -> None:
    await api.pool(str(OTHER))
    url = f"/artifacts/{digest}/{WEIGHTS}"
    answers = [await artifact_http.get(url, headers=_as(state, OTHER))]
    answers.append(await artifact_http.get(f"/artifacts/{'0' * 64}/{WEIGHTS}", headers=_as(state, MINE)))
    answers.append(await artifact_http.get(f"/artifacts/{digest}/README.md", headers=_as(state, MINE)))
    answers.append(await artifact_http.get(f"/artifacts/../{WEIGHTS}", headers=_as(state, MINE)))
    await api.ok("POST", "/admin/tenants/acme/adapters/pirate/activate", {"version": 0})
    await api.ok("DELETE", "/admin/tenants/acme/adapters/pirate/versions/1")
    answers.append(await artifact_http.get(url, headers=_as(state, MINE)))
    assert {answer.status_code for answer in answers} == {404}
    assert answers[0].content == answers[1].content == answers[2].content == answers[4].content


async def test_bytes_that_another_version_still_has_stay_served(
    digest: str, api: Api, state: RegistryState, artifact_http: httpx.AsyncClient
) -> None:
    await api.tenant("rival")
    assert (await api.register("rival", "copy", "a")).digest == digest
    await api.ok("POST", "/admin/tenants/acme/adapters/pirate/activate", {"version": 0})
    await api.ok("DELETE", "/admin/tenants/acme/adapters/pirate/versions/1")
    answer = await artifact_http.get(f"/artifacts/{digest}/{WEIGHTS}", headers=_as(state, MINE))
    assert answer.status_code == 200


async def test_a_wrong_credential_is_401(
    digest: str, api: Api, state: RegistryState, artifact_http: httpx.AsyncClient
) -> None:
    await api.pool(str(OTHER))
    refused = [
        {},
        {**_as(state, MINE), "authorization": "Bearer x"},
        {**_as(state, OTHER), headers.POOL: str(MINE)},
        _as(state, MINE, role="data"),
        _as(state, MINE, role="admin"),
        _as(state, MINE, 2),
        _as(state, MINE, 0),
        {**_as(state, MINE), headers.EPOCH: "x"},
        _as(state, PoolRef("serving", "unknown")),
        {**_as(state, MINE), headers.POOL: "x"},
    ]
    for credential in refused:
        answer = await artifact_http.get(f"/artifacts/{digest}/{WEIGHTS}", headers=credential)
        assert answer.status_code == 401, credential


async def test_the_epoch_before_is_accepted_and_the_one_before_that_is_not(
    digest: str, api: Api, state: RegistryState, artifact_http: httpx.AsyncClient
) -> None:
    url = f"/artifacts/{digest}/{WEIGHTS}"
    for newest, accepted in ((2, {1, 2}), (3, {2, 3})):
        await api.pool(credential_epoch=newest)
        got = {
            epoch for epoch in range(5) if (await artifact_http.get(url, headers=_as(state, MINE, epoch))).is_success
        }
        assert got == accepted


async def test_only_the_artifact_routes_are_on_that_listener(artifact_http: httpx.AsyncClient) -> None:
    assert (await artifact_http.get("/admin/tenants")).status_code == 404
    assert (await artifact_http.get("/health/live")).status_code == 200


def test_publishing_the_same_digest_again_keeps_the_first_bytes(state_folder: ArtifactStore) -> None:
    for content in ("first", "second"):
        staged = state_folder.stage()
        for name in ("adapter_config.json", WEIGHTS):
            (staged / name).write_text(content)
        state_folder.publish(staged, "a" * 64)
    stored = state_folder.file("a" * 64, WEIGHTS)
    assert stored is not None and stored.read_text() == "first"
    assert state_folder.file("../" + "a" * 61, WEIGHTS) is None
    assert state_folder.file("a" * 64, "../x") is None


@pytest.fixture
def state_folder(tmp_path_factory: pytest.TempPathFactory) -> ArtifactStore:
    store = ArtifactStore(tmp_path_factory.mktemp("store"))
    store.prepare()
    return store
