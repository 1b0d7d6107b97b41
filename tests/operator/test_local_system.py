"""The whole operator over the local cluster: what a person sees after writing, editing, removing YAML."""

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loraplane_core.errors import InsufficientMemory
from loraplane_core.wire.registry import Adapter, Version
from loraplane_operator import metrics
from tests.operator.fakes.registry import validated
from tests.operator.system import System, adapter_manifest, pool_manifest, running, until


async def ready(system: System, *, replicas: int = 2, **spec: Any) -> None:
    system.write("pool.yaml", pool_manifest(replicas=replicas))
    system.write("pirate.yaml", adapter_manifest(**spec))
    await until(system.ready, what="pirate ready")


async def test_adapter_becomes_ready_on_its_warm_replicas(tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await ready(system, warmReplicas=2)
        status = (system.object("loraadapter", "pirate") or {})["status"]
        assert status["resident"] == "2/2"
        assert status["version"] == status["activeVersion"] == 1
        types = [condition["type"] for condition in status["conditions"]]
        assert types == ["Claimed", "Ingested", "Validated", "Placed", "Ready"]
        assert system.holders("acme/pirate@1") == {0, 1}
        await until(lambda: system.registry.pools["default/pool"].base_digest == "b" * 64, what="learnt base")
        await until(lambda: system.condition("basemodelpool", "pool", "Available") == ("True", "Available"))


async def test_nothing_is_written_or_asked_in_quiet(tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await ready(system)
        await until(lambda: system.condition("basemodelpool", "pool", "Progressing")[0] == "False")
        await until(lambda: system.registry.pools["default/pool"].base_digest == "b" * 64, what="learnt base")
        before = _traces(system)
        await asyncio.sleep(1.5)
        assert _traces(system) == before


def _traces(system: System) -> object:
    files = {path: path.stat().st_mtime_ns for path in system.state.rglob("*") if path.is_file()}
    return files, len(system.registry.calls), [list(engine.calls) for engine in system.supervisor.engines.values()]


async def test_edited_source_serves_the_new_version_and_keeps_the_old_one_warm(tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await ready(system)
        home = system.holders("acme/pirate@1")
        started = time.monotonic()
        system.write("pirate.yaml", adapter_manifest(source={"uri": "file:pirate-2"}))
        await until(lambda: system.holders("acme/pirate@2") == home, what="version 2 on the same replica")
        assert time.monotonic() - started < 2
        assert system.holders("acme/pirate@1") == home
        await until(lambda: (system.object("loraadapter", "pirate") or {})["status"].get("activeVersion") == 2)
        await until(system.ready)


async def test_rejected_source_says_why_while_the_old_version_serves(tmp_path: Path) -> None:
    """Case O13, at the seam the operator sees: what preflight refused reaches no engine."""
    async with running(tmp_path) as system:
        await ready(system)
        home = system.holders("acme/pirate@1")

        def reject(version: Version) -> Version:
            return msgspec.structs.replace(
                version, state="rejected", reason="base_model_mismatch", message="other base"
            )

        system.registry.ingest = reject
        system.write("pirate.yaml", adapter_manifest(source={"uri": "file:wrong"}))
        await until(lambda: system.condition("loraadapter", "pirate", "Ready") == ("False", "BaseModelMismatch"))
        status = (system.object("loraadapter", "pirate") or {})["status"]
        assert status["activeVersion"] == 1
        assert status["resident"] == "1/1"
        assert system.holders("acme/pirate@1") == home


async def test_removed_file_is_a_deletion_with_all_its_phases(tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await ready(system, deletionPolicy="Delete")
        (system.folder / "pirate.yaml").unlink()
        await until(lambda: system.object("loraadapter", "pirate") is None)
        assert system.holders("acme/pirate@1") == set()
        assert ("release", "delete") in system.registry.calls
        calls = [verb for engine in system.supervisor.engines.values() for verb, _ in engine.calls]
        assert calls == ["PUT", "DELETE"]


async def test_recreated_object_of_the_same_name_works_at_once(tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await ready(system)
        first = (system.object("loraadapter", "pirate") or {})["metadata"]["uid"]
        (system.folder / "pirate.yaml").unlink()
        await until(lambda: "deletionTimestamp" in (system.object("loraadapter", "pirate") or {"deletionTimestamp": 1}))
        system.write("pirate.yaml", adapter_manifest())
        await until(lambda: system.ready() and _uid(system) != first, what="ready under a new uid")
        assert system.registry.adapters["acme", "pirate"].claim_uid == _uid(system)


def _uid(system: System) -> str:
    return str((system.object("loraadapter", "pirate") or {"metadata": {"uid": ""}})["metadata"]["uid"])


async def test_tenant_created_later_resumes_the_claim(tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        system.write("all.yaml", pool_manifest(), adapter_manifest(tenant="late"))
        await until(lambda: system.condition("loraadapter", "pirate", "Claimed") == ("False", "TenantUnknown"))
        started = time.monotonic()
        await system.registry.create_tenant("late", "default")
        await until(system.ready)
        assert time.monotonic() - started < 2


async def test_tenant_bound_later_resumes_the_claim(tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await system.registry.create_tenant("late", "elsewhere")
        system.write("all.yaml", pool_manifest(), adapter_manifest(tenant="late"))
        await until(lambda: system.condition("loraadapter", "pirate", "Ready") == ("False", "TenantNotBound"))
        started = time.monotonic()
        await system.registry.create_tenant("late", "default")
        await until(system.ready)
        assert time.monotonic() - started < 2


async def test_second_object_for_an_adapter_waits_for_the_first(tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await ready(system)
        system.write("second.yaml", adapter_manifest("second", adapter="pirate", source={"uri": "file:pirate"}))
        await until(lambda: system.condition("loraadapter", "second", "Ready") == ("False", "ClaimedByOther"))
        (system.folder / "pirate.yaml").unlink()
        await until(lambda: system.ready("second"))
        assert system.object("loraadapter", "pirate") is None


async def test_restarted_engine_gets_its_adapters_back(tmp_path: Path) -> None:
    """Case O1."""
    async with running(tmp_path) as system:
        await ready(system, warmReplicas=2)
        healed = _healed()
        await system.engine(0).restart()
        started = time.monotonic()
        await until(lambda: system.holders("acme/pirate@1") == {0, 1})
        assert time.monotonic() - started < 2
        await until(lambda: _healed() == healed + 1)


def _healed() -> float:
    return metrics.REGISTRY.get_sample_value("loraplane_operator_drift_healed_total") or 0.0


async def test_lost_adapter_is_noticed_healed_and_told(tmp_path: Path) -> None:
    """Cases O2 and O7."""
    async with running(tmp_path) as system:
        await ready(system, warmReplicas=2)
        system.engine(1).lose("acme/pirate@1")
        started = time.monotonic()
        await until(lambda: system.holders("acme/pirate@1") == {0, 1})
        assert time.monotonic() - started < 2
        await until(lambda: any(event["reason"] == "Drifted" for event in system.events()))
        await until(system.ready)


async def test_hung_engine_delays_no_other_adapter_or_replica(tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        system.write("pool.yaml", pool_manifest(replicas=2))
        await until(lambda: len(system.supervisor.engines) == 2)
        system.engine(0).hang = True
        names = [f"a{number}" for number in range(12)]  # more than one engine's gate admits
        system.write("many.yaml", *(adapter_manifest(name, warmReplicas=2) for name in names))
        await until(lambda: all(1 in system.holders(f"acme/{name}@1") for name in names), seconds=6)
        assert not any(system.ready(name) for name in names)


async def test_engine_that_lies_is_not_believed(tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        system.write("pool.yaml", pool_manifest(replicas=1))
        await until(lambda: len(system.supervisor.engines) == 1)
        system.engine(0).lies = True
        system.write("pirate.yaml", adapter_manifest())
        await until(lambda: system.condition("loraadapter", "pirate", "Ready") == ("False", "NoEffect"))
        system.engine(0).lies = False
        await until(system.ready)


async def test_refusal_of_an_engine_is_shown_and_retried(tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        system.write("pool.yaml", pool_manifest(replicas=1))
        await until(lambda: len(system.supervisor.engines) == 1)
        system.engine(0).refuse = InsufficientMemory("needs 34 MiB; 12 MiB are free")
        system.write("pirate.yaml", adapter_manifest())
        await until(lambda: system.condition("loraadapter", "pirate", "Ready") == ("False", "InsufficientMemory"))
        row = (system.object("loraadapter", "pirate") or {})["status"]["replicas"][0]
        assert row["message"] == "needs 34 MiB; 12 MiB are free"
        system.engine(0).refuse = None
        await until(system.ready)


async def test_adapter_made_by_rest_alone_is_warmed_by_the_same_rule(tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        system.write("pool.yaml", pool_manifest(replicas=3))
        version = validated(Version(tenant="acme", adapter="rest", version=1, state="ingesting"))
        made = Adapter(
            tenant="acme", adapter="rest", pool="default/pool", warm_replicas=2, active_version=1, versions=[version]
        )
        await system.registry.put(made)
        await until(lambda: len(system.holders("acme/rest@1")) == 2)


async def test_removed_version_leaves_the_engines(tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await ready(system, replicas=1)
        entry = system.registry.adapters["acme", "pirate"]
        stray = validated(Version(tenant="acme", adapter="pirate", version=2, state="ingesting"))
        await system.registry.put(msgspec.structs.replace(entry, versions=[*entry.versions, stray]))
        system.engine(0).hold("acme/pirate@2", stray.digest)
        await system.registry.put(entry)
        await until(lambda: system.holders("acme/pirate@2") == set())
        assert system.holders("acme/pirate@1") == {0}


async def test_claim_of_an_object_that_no_longer_exists_is_released(tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        left = Adapter(tenant="acme", adapter="gone", claim_uid="lost", claim_ref="default/gone", pool="default/pool")
        await system.registry.put(left)
        await until(lambda: system.registry.adapters["acme", "gone"].claim_uid == "")
        assert ("release", "retain") in system.registry.calls


async def test_restarted_operator_loads_and_registers_nothing_anew(tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await ready(system, warmReplicas=2)
        await system.stop_operator()
        puts = [list(engine.calls) for engine in system.supervisor.engines.values()]
        versions = len(system.registry.adapters["acme", "pirate"].versions)
        uid, applied = _uid(system), system.supervisor.applied[-1]
        asked = len(system.registry.calls)
        await system.start_operator()
        await until(lambda: ("report", "default/pool") in system.registry.calls[asked:])
        assert system.reconciler is not None
        passed = system.reconciler.passed_at
        system.reconciler.wake()
        await until(lambda: system.reconciler is not None and system.reconciler.passed_at > passed)
        assert {kind for kind, _ in system.registry.calls[asked:]} == {"report"}
        assert [list(engine.calls) for engine in system.supervisor.engines.values()] == puts
        assert len(system.registry.adapters["acme", "pirate"].versions) == versions
        assert (_uid(system), system.supervisor.applied[-1]) == (uid, applied)


async def test_file_removed_while_the_operator_was_away_is_a_deletion(tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await ready(system)
        await system.stop_operator()
        (system.folder / "pirate.yaml").unlink()
        await system.start_operator()
        await until(lambda: system.object("loraadapter", "pirate") is None)
        assert system.registry.adapters["acme", "pirate"].claim_uid == ""


async def test_registry_away_and_back(tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await ready(system)
        await system.registry.stop()
        system.write("second.yaml", adapter_manifest("second"))
        await until(lambda: system.object("loraadapter", "second") is not None)
        await system.registry.start()
        await until(lambda: system.ready("second"), seconds=12)
        assert system.ready()


async def test_pool_scales_and_its_deletion_stops_its_engines(tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await ready(system, replicas=1)
        system.write("pool.yaml", pool_manifest(replicas=2))
        await until(lambda: len(system.supervisor.engines) == 2)
        (system.folder / "pool.yaml").unlink()
        await until(lambda: system.object("basemodelpool", "pool") is None)
        assert system.supervisor.engines == {}
        assert system.registry.pools == {}
        await until(lambda: system.condition("loraadapter", "pirate", "Ready") == ("False", "PoolNotFound"))


async def test_changed_engine_options_replace_replicas_one_at_a_time(tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await ready(system, warmReplicas=2)
        boots = {ordinal: system.engine(ordinal).boot for ordinal in (0, 1)}
        system.write("pool.yaml", pool_manifest(replicas=2, engine={"maxRank": 32}))
        await until(lambda: all(system.engine(ordinal).boot != boots[ordinal] for ordinal in (0, 1)))
        assert dict(system.supervisor.applied[-1].engine)["max-rank"] == "32"
        await until(lambda: system.holders("acme/pirate@1") == {0, 1})
        await until(system.ready)


@pytest.mark.parametrize("uri", ["file:missing", "file:link"])
async def test_base_that_cannot_be_used_degrades_the_pool(tmp_path: Path, uri: str) -> None:
    async with running(tmp_path) as system:
        (tmp_path / "outside").mkdir()
        (tmp_path / "outside" / "config.json").write_text("{}")
        (system.models / "link").symlink_to(tmp_path / "outside")
        system.write("pool.yaml", pool_manifest(baseModel={"name": "base-a", "uri": uri}))
        reason = "SourceNotAllowed" if uri == "file:link" else "BaseNotFound"
        await until(lambda: system.condition("basemodelpool", "pool", "Degraded") == ("True", reason))
        assert system.supervisor.engines == {}
