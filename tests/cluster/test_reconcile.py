"""Adapters and pools on a real control plane. All engines are real `loraplane-engine` processes with the real
model, started by the kubelet stand-in."""

import time

from tests.cluster.fixtures import REAL_REPLICAS
from tests.cluster.services import until
from tests.cluster.system import System, measured

ALL = set(range(REAL_REPLICAS))
READY_SECONDS = 3.0
HEAL_SECONDS = 2.0
RESTART_SECONDS = 5.0


def test_apply_to_ready_on_all_replicas_takes_at_most_three_seconds_o17_o19(system: System) -> None:
    """With the artifact local; the loads on the replicas go side by side."""
    took = measured(
        lambda: system.adapter("pirate", warmReplicas=REAL_REPLICAS),
        lambda: system.ready("pirate"),
        20,
        lambda: system.explain("pirate"),
    )
    assert system.holders("acme/pirate@1") == ALL
    assert took <= READY_SECONDS, system.explain("pirate")


def test_kubectl_shows_true_values_at_every_step(system: System) -> None:
    """The columns are compared with what the engines, the artifact and the clock say."""
    system.adapter("pirate", warmReplicas=2)
    seen = set()

    def row() -> dict[str, str]:
        found = system.columns("lora")["pirate"]
        seen.add((found.get("READY", ""), found.get("REASON", "")))
        return found

    until(lambda: row()["READY"] == "True", 20, lambda: str(seen))
    last = row()
    assert (last["TENANT"], last["BASE"], last["VERSION"]) == ("acme", "smollm2-135m-instruct", "1")
    assert (last["RESIDENT"], last["REASON"]) == ("2/2", "Ready")
    rank = system.services.rows("SELECT rank FROM tenant_adapters WHERE tenant_id = 'acme' AND adapter = 'pirate'")
    assert last["RANK"] == str(rank[0][0])
    assert len(system.holders("acme/pirate@1")) == 2
    assert not any(ready == "True" and reason != "Ready" for ready, reason in seen), seen
    # Tests before this one leave versions behind; an adapter without any is only a counter.
    query = """SELECT count(DISTINCT v.adapter) FROM adapters a JOIN tenant_adapters v
               ON v.tenant_id = a.tenant_id AND v.adapter = a.name WHERE a.pool = %s"""
    known = str(system.services.rows(query, f"{system.namespace}/smol")[0][0])
    wanted = {"READY": str(REAL_REPLICAS), "ADAPTERS": known}
    pool = until(lambda: _shown(system, **wanted), 35, lambda: f"{wanted} {system.columns('bmp')}")
    assert (pool["BASE"], pool["REPLICAS"], pool["AVAILABLE"]) == ("smollm2-135m-instruct", str(REAL_REPLICAS), "True")


def _shown(system: System, **wanted: str) -> dict[str, str]:
    row = system.columns("bmp")["smol"]
    return row if all(row.get(name) == value for name, value in wanted.items()) else {}


def test_a_warm_adapter_that_an_engine_lost_is_back_within_two_seconds_with_cause_and_event_o2_o7_o11(
    system: System,
) -> None:
    system.adapter("pirate", warmReplicas=REAL_REPLICAS)
    system.until_ready("pirate")
    changed = _changed(system, "pirate")
    digest = system.status("pirate")["digest"]

    def lose() -> None:
        """As an eviction looks from outside: the engine drops it, and nobody asked the operator."""
        where = "/adapters/acme/pirate/1?drain_s=0"
        assert system.engine(1, "DELETE", where, headers={"x-loraplane-digest": digest}).is_success

    took = measured(
        lose, lambda: system.held(1).get("acme/pirate@1") in ("host", "device"), 20, lambda: system.explain("pirate")
    )
    assert took <= HEAL_SECONDS
    system.until_ready("pirate", seconds=10)
    told = until(lambda: [each for each in system.events("pirate") if each[0] == "Drifted"], 5, str(system.events()))
    assert any(f"{system.namespace}/smol/1" in message for _, message in told)
    assert _changed(system, "pirate") >= changed


def _changed(system: System, name: str) -> str:
    conditions = system.status(name).get("conditions") or []
    return str(next(each["lastTransitionTime"] for each in conditions if each["type"] == "Ready"))


def test_a_killed_engine_has_its_adapters_back_and_routable_within_five_seconds_of_readiness_o1(
    system: System,
) -> None:
    names = ("pirate", "html", "json")
    for name in names:
        system.adapter(name, warmReplicas=REAL_REPLICAS)
    system.until_ready(*names)
    key = system.services.key("acme")
    killed = system.kill_engine(0)
    pod = until(lambda: _restarted(system, killed.pid), 90, lambda: system.explain(""))
    until(lambda: 0 in system.holders("acme/json@1"), 20, lambda: system.explain("json"), every=0.02)
    for name in names:
        until(lambda name=name: 0 in system.holders(f"acme/{name}@1"), 20, name)  # type: ignore[misc]
        answer = system.services.ask(key, name)
        assert answer.status_code == 200 and answer.headers["x-loraplane-adapter-id"].startswith(f"acme/{name}@1#")
    assert time.time() - pod.ready_at <= RESTART_SECONDS
    system.until_ready(*names)


def _restarted(system: System, before: int):  # type: ignore[no-untyped-def]
    pod = system.pods().get(0)
    return pod if pod is not None and pod.ready and pod.pid not in (0, before) else None


def test_a_bad_adapter_is_refused_with_its_reason_and_delays_no_good_one_o13(system: System) -> None:
    (system.services.adapter_root / "empty").mkdir(exist_ok=True)
    for name in ("other-base", "empty", "nowhere"):
        system.adapter(name)
    took = measured(
        lambda: system.adapter("pirate"), lambda: system.ready("pirate"), 20, lambda: system.explain("pirate")
    )
    assert took <= READY_SECONDS
    until(
        lambda: system.condition("other-base", "Ready")[1] == "BaseModelMismatch",
        15,
        lambda: system.explain("other-base"),
    )
    for name in ("other-base", "empty", "nowhere"):
        status, reason = system.condition(name, "Ready")
        assert status == "False" and reason not in ("", "InternalError"), system.explain(name)
        assert system.holders(f"acme/{name}@1") == set()


def test_a_deleted_adapter_leaves_engines_and_claims_and_may_be_made_again_at_once(system: System) -> None:
    system.adapter("pirate", warmReplicas=2)
    system.until_ready("pirate")
    first = system.get("pirate")
    system.delete("pirate")
    system.until_gone("pirate")
    assert system.holders("acme/pirate@1") == set()
    assert system.services.rows("SELECT claim_uid FROM adapters WHERE name = 'pirate' AND claim_uid IS NOT NULL") == []
    system.adapter("pirate", warmReplicas=2, source="pirate-v2")
    system.until_ready("pirate")
    again = system.get("pirate")
    assert first is not None and again is not None
    assert again["metadata"]["uid"] != first["metadata"]["uid"]
    assert again["status"]["digest"] != first["status"]["digest"]
    assert len(system.holders(f"acme/pirate@{again['status']['version']}")) == 2


def test_two_objects_for_one_adapter_first_wins_and_the_loser_says_whose_it_is_o64(system: System) -> None:
    system.adapter("pirate")
    system.until_ready("pirate")
    system.adapter("second", adapter="pirate", source="html")
    until(lambda: system.condition("second", "Claimed")[1] == "ClaimedByOther", 10, lambda: system.explain("second"))
    message = next(each["message"] for each in system.status("second")["conditions"] if each["type"] == "Claimed")
    assert f"{system.namespace}/pirate" in message
    assert system.ready("pirate")
    system.delete("pirate")
    system.until_ready("second")


def test_names_of_two_tenants_never_meet_o62(system: System) -> None:
    system.adapter("first", adapter="support", source="pirate")
    system.adapter("other", tenant="globex", adapter="support", source="html")
    system.until_ready("first", "other")
    digests = {name: system.status(name)["digest"] for name in ("first", "other")}
    assert digests["first"] != digests["other"]
    for tenant, name in (("acme", "first"), ("globex", "other")):
        answer = system.services.ask(system.services.key(tenant), "support")
        assert answer.headers["x-loraplane-adapter-id"] == f"{tenant}/support@1#{digests[name][:12]}"
    refused = system.services.ask(system.services.key("globex"), "acme/support")
    assert refused.status_code == 404


def test_removing_one_adapter_takes_nothing_from_the_others_o58(system: System) -> None:
    for name in ("pirate", "html"):
        system.adapter(name, warmReplicas=REAL_REPLICAS)
    system.until_ready("pirate", "html")
    key = system.services.key("acme")
    system.delete("html")
    system.until_gone("html")
    assert system.services.ask(key, "pirate").status_code == 200
    assert system.services.ask(key, "html").status_code == 404
    assert system.holders("acme/pirate@1") == ALL
    assert system.ready("pirate")
