"""Adapters over the local cluster: weights, versions that wait for warmth, room, engines that lose what they hold."""

import time
from pathlib import Path
from typing import Any

import msgspec

from loraplane_core.wire.registry import Version
from tests.operator.fakes.registry import validated
from tests.operator.system import System, adapter_manifest, pool_manifest, running, until

KEY = ("acme", "pirate")


async def two_versions(system: System, **spec: Any) -> None:
    """Registered one after the other; version 2 is active."""
    system.write("pool.yaml", pool_manifest(replicas=2))
    system.write("pirate.yaml", adapter_manifest())
    await until(system.ready, what="version 1 ready")
    system.write("pirate.yaml", adapter_manifest(source={"uri": "file:pirate-2"}, **spec))
    await until(lambda: len(system.registry.adapters[KEY].versions) == 2, what="version 2 registered")


def shares(system: System) -> dict[int, int]:
    return {each.version: each.weight for each in system.registry.adapters[KEY].versions if each.weight}


def events(system: System, reason: str) -> list[str]:
    return [each["message"] for each in system.events() if each["reason"] == reason]


async def test_weights_of_the_object_reach_the_registry_and_both_versions_are_warm(tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        canary = [{"version": 1, "weight": 90}, {"version": 2, "weight": 10}]
        await two_versions(system, traffic=canary)
        await until(lambda: shares(system) == {1: 90, 2: 10}, what="weights set")
        await until(system.ready)
        assert system.holders("acme/pirate@1") == system.holders("acme/pirate@2") != set()
        assert [call for call in system.registry.calls if call[0] == "traffic"] == [("traffic", "1=90,2=10")]


async def test_unset_traffic_gives_activation_back_and_moves_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await two_versions(system, traffic=[{"version": 1, "weight": 90}, {"version": 2, "weight": 10}])
        await until(lambda: shares(system) == {1: 90, 2: 10})
        system.write("pirate.yaml", adapter_manifest(source={"uri": "file:pirate-2"}))
        await until(lambda: system.registry.adapters[KEY].activation_owner == "registry")
        assert shares(system) == {1: 90, 2: 10}


async def test_version_that_waits_for_warmth_is_warmed_and_confirmed(tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        await two_versions(system)
        await until(lambda: shares(system) == {2: 100})
        await until(system.ready)
        await system.registry.intend(KEY, 1)
        await until(lambda: shares(system) == {1: 100}, what="flipped")
        assert ("warm", "pirate@1") in system.registry.calls


async def test_adapter_without_room_waits_and_is_placed_when_another_goes(tmp_path: Path) -> None:
    def big(version: Version) -> Version:
        return msgspec.structs.replace(validated(version), bytes=40 << 20)  # the engines have 64 MiB

    async with running(tmp_path) as system:
        system.registry.ingest = big
        system.write("pool.yaml", pool_manifest(replicas=1))
        system.write("pirate.yaml", adapter_manifest())
        await until(system.ready)
        system.write("json.yaml", adapter_manifest("json"))
        await until(lambda: system.condition("loraadapter", "json", "Ready") == ("False", "InsufficientMemory"))
        (told,) = events(system, "InsufficientMemory")
        assert told.startswith("needs 40 MiB on 1 replica; pool has 24 MiB free")
        assert system.holders("acme/json@1") == set()
        (system.folder / "pirate.yaml").unlink()
        await until(lambda: system.ready("json"), what="json placed")


async def test_restarted_engine_is_named_and_its_recovery_timed_o1(tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        system.write("pool.yaml", pool_manifest(replicas=2))
        system.write("pirate.yaml", adapter_manifest(warmReplicas=2))
        await until(system.ready)
        await system.engine(0).restart()
        await until(lambda: events(system, "Healed"), what="healed")
        (told,) = events(system, "Healed")
        assert told.startswith("default/pool/0 holds it again after ")
        assert told.endswith("restarted and lost it") or told.endswith("had not answered")
        await until(system.ready)


async def test_dropped_adapter_is_named_and_back_within_two_seconds_o2_o7(tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        system.write("pool.yaml", pool_manifest(replicas=2))
        system.write("pirate.yaml", adapter_manifest(warmReplicas=2))
        await until(system.ready)
        started = time.monotonic()
        system.engine(1).lose("acme/pirate@1")
        await until(lambda: system.holders("acme/pirate@1") == {0, 1})
        assert time.monotonic() - started < 2
        await until(lambda: events(system, "Healed"), what="healed")
        assert events(system, "Drifted") == ["default/pool/1: the engine dropped it; it is being loaded again"]
        await until(system.ready)


async def test_deleted_and_created_again_works_at_once(tmp_path: Path) -> None:
    async with running(tmp_path) as system:
        system.write("pool.yaml", pool_manifest(replicas=1))
        system.write("pirate.yaml", adapter_manifest(deletionPolicy="Delete"))
        await until(system.ready)
        (system.folder / "pirate.yaml").unlink()
        await until(lambda: system.condition("loraadapter", "pirate", "Deleting")[0] == "True")
        started = time.monotonic()
        system.write("pirate.yaml", adapter_manifest())
        await until(lambda: system.condition("loraadapter", "pirate", "Deleting")[0] == "" and system.ready())
        assert time.monotonic() - started < 4
