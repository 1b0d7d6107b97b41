"""When a start counts as finished: what the operator reports, read beside what really runs."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loraplane_cli import progress as module
from loraplane_cli.commands.top import parse_metrics
from loraplane_cli.envfile import read_env, write_env
from loraplane_cli.progress import Progress
from loraplane_cli.supervisor.status import SupervisorStatus
from loraplane_core.wire.supervisor import ReplicaStatus, WorkloadStatus
from tests.cli.test_folder_commands import LORA, POOL, TENANT, Here


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    monkeypatch.setattr(module, "SETTLE_SECONDS", 0.0)
    return Here(tmp_path)


def running(here: Here, *, ready: bool) -> None:
    replica = ReplicaStatus(ordinal=0, pid=1, ready=ready, restarts=0, revision="r")
    status = SupervisorStatus(
        phase="running",
        pid=1,
        folder=str(here.folder),
        workloads=[WorkloadStatus(namespace="default", pool="smol", replicas=[replica])],
    )
    here.state.status.write_bytes(msgspec.json.encode(status))


def stored(here: Here, document: dict[str, Any], kind: str, status: str, reason: str) -> None:
    full = json.loads(json.dumps(document))
    if document is POOL:
        full["spec"] |= {"runtime": "Native", "engine": {"dtype": "auto", "maxRank": 64}, "resources": {}}
        full["spec"]["baseModel"]["aliases"] = []
        full["spec"]["resources"] = {"limits": {}, "requests": {}}
    else:
        full["spec"] |= {"warmReplicas": 1, "pinned": False, "deletionPolicy": "Retain"}
    here.store(full, conditions=[{"type": kind, "status": status, "reason": reason, "message": "because"}])


def states(here: Here) -> dict[str, str]:
    return {item.name: item.state for item in Progress(here.state, here.folder).snapshot().items}


def test_objects_are_ready_when_reported_so_and_an_engine_serves(here: Here) -> None:
    here.command.run("apply", "-f", here.give(POOL, LORA))
    running(here, ready=False)
    stored(here, POOL, "Available", "True", "Available")
    stored(here, LORA, "Ready", "True", "Ready")
    assert states(here) == {"smol": "waiting", "pirate": "waiting"}  # an earlier run's words
    running(here, ready=True)
    assert states(here) == {"smol": "ready", "pirate": "ready"}
    assert Progress(here.state, here.folder).snapshot().settled


def test_a_refusal_is_a_failure_and_work_under_way_is_not(here: Here) -> None:
    here.command.run("apply", "-f", here.give(POOL, LORA))
    running(here, ready=True)
    stored(here, POOL, "Available", "True", "Available")
    stored(here, LORA, "Ready", "False", "Ingesting")
    assert states(here)["pirate"] == "waiting"
    stored(here, LORA, "Ready", "False", "BaseModelMismatch")
    snapshot = Progress(here.state, here.folder).snapshot()
    assert snapshot.settled
    assert snapshot.failures == ["LoRAAdapter default/pirate: BaseModelMismatch: because"]


def test_nothing_fails_while_a_tenant_of_the_folder_is_still_to_be_made(here: Here) -> None:
    here.command.run("apply", "-f", here.give(LORA, TENANT))
    running(here, ready=True)
    stored(here, LORA, "Ready", "False", "TenantUnknown")
    assert states(here) == {"pirate": "waiting", "acme": "waiting"}
    write_env(here.state.env, {"LORAPLANE_KEY_ACME": "lp_1"})
    assert states(here) == {"pirate": "failed", "acme": "ready"}


def test_an_edited_document_waits_until_it_is_in_force(here: Here) -> None:
    here.command.run("apply", "-f", here.give(POOL))
    running(here, ready=True)
    stored(here, POOL, "Available", "True", "Available")
    edited = POOL | {"spec": POOL["spec"] | {"replicas": 3}}  # type: ignore[operator]
    here.command.run("apply", "-f", here.give(edited))
    assert states(here) == {"smol": "waiting"}


def test_a_broken_document_and_a_refused_edit_are_told(here: Here) -> None:
    (here.folder / "broken.yaml").write_text("kind: [")
    (here.folder / "edit.yaml").write_text(json.dumps(LORA))
    running(here, ready=True)
    stored(here, LORA, "Ready", "True", "Ready")
    told = "LoRAAdapter/default/pirate: spec.poolRef is immutable; the old spec stays in force"
    here.state.problems.write_text(json.dumps([{"path": "edit.yaml", "message": told}]))
    snapshot = Progress(here.state, here.folder).snapshot()
    assert [item.state for item in snapshot.items] == ["failed"]
    assert snapshot.failures[0] == f"LoRAAdapter default/pirate: NotInForce: {told}"
    assert "broken.yaml" in snapshot.failures[1]
    assert len(snapshot.failures) == 2
    only = Progress(here.state, here.folder, [("LoRAAdapter", "default", "pirate")]).snapshot()
    assert len(only.failures) == 1  # a neighbour's broken file is not what was applied


@pytest.mark.parametrize("value", ["plain", "it's", 'a "b" $HOME `id` \\', "", "postgresql://u:p%40@h/d?x=1&y=2"])
def test_an_env_file_gives_back_what_was_written(tmp_path: Path, value: str) -> None:
    write_env(tmp_path / "env", {"LORAPLANE_KEY_A": value, "LORAPLANE_KEY_B": "b"})
    assert read_env(tmp_path / "env") == {"LORAPLANE_KEY_A": value, "LORAPLANE_KEY_B": "b"}
    assert (tmp_path / "env").stat().st_mode & 0o777 == 0o600


def test_metrics_are_read_with_their_labels_and_foreign_ones_passed_over() -> None:
    text = "\n".join(
        [
            "# HELP loraplane_engine_kv_tokens x",
            "loraplane_engine_kv_tokens 24752.0",
            'loraplane_engine_adapter_tokens_total{tenant="acme",adapter="pirate"} 1e+03',
            "process_open_fds 7",
        ]
    )
    assert dict(parse_metrics(text)) == {
        ("kv_tokens", ()): 24752.0,
        ("adapter_tokens_total", (("tenant", "acme"), ("adapter", "pirate"))): 1000.0,
    }
