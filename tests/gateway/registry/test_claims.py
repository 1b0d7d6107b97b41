"""Claims, what objects register, and who decides what is served."""

import asyncio
from typing import Any

import pytest

from loraplane_gateway.registry.state import RegistryState
from tests.gateway.artifacts import write_adapter
from tests.gateway.registry.conftest import POOL, Api, InlineWorkers, dispatching


def claim(namespace: str = "team", name: str = "pirate", **more: Any) -> dict[str, Any]:
    return {"ref": f"{namespace}/{name}", "tenant": "acme", "adapter": "pirate", "pool": POOL, **more}


@pytest.fixture
async def bound(api: Api, state: RegistryState) -> Api:
    await api.tenant("acme", "team")
    await api.pool()
    for number in (1, 2, 3):
        write_adapter(state.settings.adapter_root / f"v{number}", seed=number)
    return api


async def _register(api: Api, uid: str, path: str, source_hash: str | None = None) -> dict[str, Any]:
    body = {"source": {"uri": f"file:{path}"}, "source_hash": source_hash or path}
    answer: dict[str, Any] = await api.as_operator("POST", f"/operator/claims/{uid}/register", body)
    return answer


async def _refused(api: Api, status: int, code: str, uid: str, body: dict[str, Any]) -> str:
    return await api.refused(status, code, "PUT", f"/operator/claims/{uid}", body, token=api.operator_token)


async def test_the_first_object_wins_and_the_loser_learns_whose_it_is(bound: Api) -> None:
    await bound.tenant("acme", "team", "other")
    outcomes = await asyncio.gather(
        *(
            bound.call("PUT", f"/operator/claims/u{n}", claim(name=f"o{n}"), token=bound.operator_token)
            for n in range(5)
        )
    )
    won = [answer.json() for answer in outcomes if answer.status_code == 200]
    lost = [answer.json()["error"] for answer in outcomes if answer.status_code != 200]
    assert len(won) == 1
    assert {error["code"] for error in lost} == {"claimed_by_other"}
    assert all(won[0]["ref"] in error["message"] for error in lost)
    assert (await bound.as_operator("GET", "/operator/claims"))["claims"] == won
    await bound.as_operator("PUT", f"/operator/claims/{won[0]['uid']}", claim(name=won[0]["ref"].split("/")[1]))
    await bound.as_operator("DELETE", f"/operator/claims/{won[0]['uid']}")
    await bound.as_operator("PUT", "/operator/claims/u9", claim(namespace="other"))


async def test_one_object_that_claims_two_adapters_at_once_gets_one_of_them(bound: Api) -> None:
    for turn in range(10):
        answers = await asyncio.gather(
            *(
                bound.call("PUT", f"/operator/claims/t{turn}", claim(adapter=f"a{turn}{n}"), token=bound.operator_token)
                for n in range(4)
            )
        )
        assert sorted(answer.status_code for answer in answers) == [200, 409, 409, 409]


async def test_claims_are_refused_with_their_reason(bound: Api) -> None:
    await _refused(bound, 404, "tenant_unknown", "u", claim(tenant="nobody"))
    await _refused(bound, 403, "tenant_not_bound", "u", claim(namespace="stranger"))
    await _refused(bound, 400, "invalid_name", "u", claim(adapter="../x"))
    await _refused(bound, 400, "invalid_name", "u", claim(pool="x"))
    await _refused(bound, 400, "invalid_name", "u", claim(ref="no-slash"))
    await _refused(bound, 400, "reserved_name", "u", claim(adapter="tiny-llama"))
    await bound.pool(allowed_namespaces=["elsewhere"])
    await _refused(bound, 403, "pool_not_allowed", "u", claim())
    await bound.pool()
    await bound.as_operator("PUT", "/operator/claims/u", claim())
    await _refused(bound, 409, "immutable_field", "u", claim(adapter="another"))
    assert len((await bound.as_operator("GET", "/operator/claims"))["claims"]) == 1


async def test_a_tenant_made_later_is_claimed_then(bound: Api) -> None:
    await _refused(bound, 404, "tenant_unknown", "u", claim(tenant="late"))
    await bound.tenant("late", "team")
    await bound.as_operator("PUT", "/operator/claims/u", claim(tenant="late"))


async def test_registering_is_idempotent_and_activates_once(bound: Api, ingesting: None, state: RegistryState) -> None:
    await bound.as_operator("PUT", "/operator/claims/u", claim())
    both = await asyncio.gather(*(_register(bound, "u", "v1") for _ in range(3)))
    assert [version["version"] for version in both] == [1, 1, 1]
    await bound.until("acme", "pirate", lambda found: found.active_version == 1)
    assert (await _register(bound, "u", "v2"))["version"] == 2
    await bound.until("acme", "pirate", lambda found: found.active_version == 2)
    await bound.ok("POST", "/admin/tenants/acme/adapters/pirate/rollback", {})
    again = await _register(bound, "u", "v2")  # the same source again must not undo the rollback
    assert (again["version"], again["state"], again["is_active"]) == (2, "validated", False)
    # The same bytes under another hash are the same version, activated once for that hash.
    await _register(bound, "u", "v2", "edited")
    await bound.until("acme", "pirate", lambda found: found.active_version == 2)
    assert (await _register(bound, "u", "v2", "edited"))["version"] == 2


async def test_a_source_that_the_object_returned_to_serves_again(bound: Api, ingesting: None) -> None:
    await bound.as_operator("PUT", "/operator/claims/u", claim())
    await _register(bound, "u", "v1")
    await bound.until("acme", "pirate", lambda found: found.active_version == 1)
    await _register(bound, "u", "v2")
    await bound.until("acme", "pirate", lambda found: found.active_version == 2)
    body = {"source": {"uri": "file:v1"}, "source_hash": "v1", "returned": True}
    assert (await bound.as_operator("POST", "/operator/claims/u/register", body))["is_active"]
    assert (await bound.adapter("acme", "pirate")).active_version == 1


async def test_what_was_named_in_between_and_is_ingested_late_does_not_serve(bound: Api, state: RegistryState) -> None:
    await bound.as_operator("PUT", "/operator/claims/u", claim())
    for number in (1, 2):
        await _register(bound, "u", f"v{number}")
    body = {"source": {"uri": "file:v1"}, "source_hash": "v1", "returned": True}
    await bound.as_operator("POST", "/operator/claims/u/register", body)
    async with dispatching(state, InlineWorkers(2)):
        found = await bound.until("acme", "pirate", lambda a: all(each.state == "validated" for each in a.versions))
    assert [each.version for each in found.versions if each.is_active] == [1]


async def test_a_known_source_is_answered_with_what_it_became_and_a_removed_one_is_not_made_again(
    bound: Api, ingesting: None, state: RegistryState
) -> None:
    await bound.as_operator("PUT", "/operator/claims/u", claim())
    await _register(bound, "u", "v1")
    await bound.until("acme", "pirate", lambda found: found.active_version == 1)
    twin = await _register(bound, "u", "v1", "twin")
    assert twin["version"] == 2  # until its bytes were read
    body = {"source": {"uri": "file:v1"}, "source_hash": "twin", "known_only": True}
    await bound.until("acme", "pirate", lambda found: [each.version for each in found.versions] == [1])
    assert (await bound.as_operator("POST", "/operator/claims/u/register", body))["version"] == 1
    await _register(bound, "u", "v2")
    await bound.until("acme", "pirate", lambda found: found.active_version == 3)
    await bound.ok("DELETE", "/admin/tenants/acme/adapters/pirate/versions/1")
    path = "/operator/claims/u/register"
    await bound.refused(410, "adapter_withdrawn", "POST", path, body, token=bound.operator_token)


async def test_a_known_registration_answers_even_when_its_source_is_gone(
    bound: Api, ingesting: None, state: RegistryState
) -> None:
    await bound.as_operator("PUT", "/operator/claims/u", claim())
    await _register(bound, "u", "v1")
    await bound.until("acme", "pirate", lambda found: found.active_version == 1)
    (state.settings.adapter_root / "v1").rename(state.settings.adapter_root / "gone")
    assert (await _register(bound, "u", "v1"))["state"] == "validated"
    body = {"source": {"uri": "file:v1"}, "source_hash": "new"}
    await bound.refused(
        422, "source_not_found", "POST", "/operator/claims/u/register", body, token=bound.operator_token
    )


async def test_an_object_that_owns_activation_alone_decides(bound: Api, ingesting: None) -> None:
    await bound.as_operator("PUT", "/operator/claims/u", claim(owns_activation=True))
    await _register(bound, "u", "v1")
    await bound.until("acme", "pirate", lambda found: found.versions[0].state == "validated")
    assert (await bound.adapter("acme", "pirate")).active_version == 0
    url = "/admin/tenants/acme/adapters/pirate"
    await bound.refused(409, "activation_owned", "POST", f"{url}/activate", {"version": 1})
    await bound.refused(409, "activation_owned", "POST", f"{url}/rollback", {})
    await bound.as_operator("POST", "/operator/claims/u/activate", {"version": 1})
    assert (await bound.adapter("acme", "pirate")).activation_owner == "object"
    await bound.as_operator("PUT", "/operator/claims/u", claim())  # activeVersion unset: the pointer stays
    adapter = await bound.adapter("acme", "pirate")
    assert (adapter.activation_owner, adapter.active_version) == ("registry", 1)
    await bound.ok("POST", f"{url}/activate", {"version": 0})


async def test_while_an_object_claims_rest_cannot_move_the_adapter(bound: Api) -> None:
    await bound.pool("serving/second")
    await bound.as_operator("PUT", "/operator/claims/u", claim(warm_replicas=2, pinned=True))
    body = {"source": {"uri": "file:v1"}, "pool": "serving/second"}
    await bound.refused(409, "managed_by_object", "POST", "/admin/tenants/acme/adapters/pirate/versions", body)
    adapter = await bound.adapter("acme", "pirate")
    assert (adapter.warm_replicas, adapter.pinned, adapter.claim_ref) == (2, True, "team/pirate")


@pytest.mark.parametrize(("versions", "kept"), [("retain", [1]), ("delete", [])])
async def test_releasing_a_claim_stops_serving_and_keeps_or_deletes_versions(
    bound: Api, ingesting: None, versions: str, kept: list[int]
) -> None:
    await bound.as_operator("PUT", "/operator/claims/u", claim())
    await _register(bound, "u", "v1")
    await bound.until("acme", "pirate", lambda found: found.active_version == 1)
    await bound.refused(409, "tenant_in_use", "DELETE", "/admin/tenants/acme")
    for _ in range(2):
        await bound.as_operator("DELETE", f"/operator/claims/u?versions={versions}")
    await bound.refused(
        404, "not_found", "POST", "/operator/claims/u/activate", {"version": 1}, token=bound.operator_token
    )
    adapters = (await bound.ok("GET", "/admin/tenants/acme/adapters"))["adapters"]
    assert [version["version"] for adapter in adapters for version in adapter["versions"]] == kept
    await bound.as_operator("PUT", "/operator/claims/u2", claim())
    fresh = await _register(bound, "u2", "v2")
    assert fresh["version"] == 2  # a number never comes twice
    await bound.until("acme", "pirate", lambda found: found.active_version == 2)


async def test_a_pool_reported_after_the_claim_lets_the_version_go_on(
    api: Api, ingesting: None, state: RegistryState
) -> None:
    write_adapter(state.settings.adapter_root / "v1")
    await api.tenant("acme", "team")
    await api.as_operator("PUT", "/operator/claims/u", claim())
    assert (await _register(api, "u", "v1"))["state"] == "pending_base"
    await api.pool()
    await api.until("acme", "pirate", lambda found: found.active_version == 1)


async def test_a_source_set_back_while_no_operator_ran_serves_again(bound: Api, ingesting: None) -> None:
    await bound.as_operator("PUT", "/operator/claims/u", claim())
    assert (await bound.adapter("acme", "pirate")).source_hash == ""
    for number in (1, 2):
        await _register(bound, "u", f"v{number}")
        found = await bound.until("acme", "pirate", lambda a, number=number: a.active_version == number)  # type: ignore[misc]
        assert (found.source_hash, found.source_version) == (f"v{number}", number)
    await _register(bound, "u", "v1")  # an operator that has just started, and knows of no other source
    found = await bound.adapter("acme", "pirate")
    assert (found.source_hash, found.source_version, found.active_version) == ("v1", 1, 1)


async def test_the_present_source_follows_its_version_and_ends_with_the_claim(bound: Api, ingesting: None) -> None:
    await bound.as_operator("PUT", "/operator/claims/u", claim())
    await _register(bound, "u", "v1")
    await bound.until("acme", "pirate", lambda found: found.active_version == 1)
    await _register(bound, "u", "v1", "twin")
    found = await bound.until("acme", "pirate", lambda found: len(found.versions) == 1)
    assert (found.source_hash, found.source_version) == ("twin", 1)
    body = {"source": {"uri": "file:none"}, "source_hash": "refused"}
    path = "/operator/claims/u/register"
    await bound.refused(422, "source_not_found", "POST", path, body, token=bound.operator_token)
    assert (await bound.adapter("acme", "pirate")).source_hash == "twin"
    await bound.ok("POST", "/admin/tenants/acme/adapters/pirate/activate", {"version": 0})
    await bound.ok("DELETE", "/admin/tenants/acme/adapters/pirate/versions/1")
    found = await bound.adapter("acme", "pirate")
    assert (found.source_hash, found.source_version) == ("twin", 0)
    await bound.as_operator("DELETE", "/operator/claims/u")
    await bound.as_operator("PUT", "/operator/claims/another", claim())
    assert (await bound.adapter("acme", "pirate")).source_hash == ""
