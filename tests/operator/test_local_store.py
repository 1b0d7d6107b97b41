"""The folder and the stored objects: no accident looks like a deletion, and what is stored is what was wished."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from loraplane_core.labels import FINALIZER
from loraplane_operator.actions import Note, ObjectRef
from loraplane_operator.cluster import events
from loraplane_operator.cluster.events import EventLog
from loraplane_operator.cluster.folder import Folder, Problem
from loraplane_operator.cluster.store import Store
from tests.operator.system import adapter_manifest, pool_manifest

PIRATE = ObjectRef("LoRAAdapter", "default", "pirate")


class Local:
    def __init__(self, root: Path) -> None:
        self.root = root / "yaml"
        self.root.mkdir(exist_ok=True)
        self.state = root / "objects"
        self.open()

    def open(self) -> None:
        """As after a restart of the operator."""
        self.folder, self.store = Folder(self.root), Store(self.state)

    def write(self, file: str, *documents: dict[str, Any]) -> None:
        path = self.root / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump_all(documents))

    def settle(self) -> list[Problem]:
        """Scan until everything that changed counts; the problems of the last scan."""
        problems: list[Problem] = []
        for _ in range(3):
            scan = self.folder.scan()
            _, refused = self.store.merge(scan)
            problems = [*scan.problems, *refused]
        return problems

    def names(self) -> set[str]:
        return {each.meta.ref.name for each in self.store.adapters()} | {each.name for each in self.store.pools()}

    def json(self, ref: ObjectRef = PIRATE) -> dict[str, Any]:
        path = self.state / ref.kind.lower() / ref.namespace / f"{ref.name}.json"
        found: dict[str, Any] = json.loads(path.read_text())
        return found


@pytest.fixture
def local(tmp_path: Path) -> Local:
    return Local(tmp_path)


def test_stored_object_is_what_get_shows(local: Local) -> None:
    local.write("sub/a.yml", adapter_manifest(), {"apiVersion": "loraplane.dev/v1alpha1", "kind": "Tenant"})
    assert local.settle() == []
    stored = local.json()
    assert (stored["apiVersion"], stored["kind"]) == ("loraplane.dev/v1alpha1", "LoRAAdapter")
    assert stored["metadata"]["namespace"] == "default"
    assert stored["metadata"]["generation"] == 1
    assert stored["metadata"]["uid"]
    assert stored["metadata"]["creationTimestamp"].endswith("Z")
    assert stored["spec"]["source"] == {"uri": "file:pirate"}
    assert stored["status"] == {}


def test_spec_edit_raises_the_generation_and_keeps_uid_and_status(local: Local) -> None:
    local.write("a.yaml", adapter_manifest())
    local.settle()
    before = local.json()
    uid = before["metadata"]["uid"]
    assert local.store.set_status(PIRATE, uid, {"version": 1})
    local.write("a.yaml", adapter_manifest(warmReplicas=2))
    local.settle()
    after = local.json()
    assert after["metadata"]["generation"] == 2
    assert (after["metadata"]["uid"], after["status"]) == (uid, {"version": 1})


def test_nothing_is_written_when_nothing_changed(local: Local) -> None:
    local.write("a.yaml", adapter_manifest())
    local.settle()
    path = local.state / "loraadapter/default/pirate.json"
    before = path.stat().st_mtime_ns
    (local.root / "a.yaml").touch()
    local.settle()
    assert not local.store.set_status(PIRATE, local.json()["metadata"]["uid"], {})
    assert path.stat().st_mtime_ns == before


BROKEN: dict[str, str | bytes] = {
    "empty": "",
    "blank": " \n\n",
    "syntax": "kind: [",
    "binary": b"\xff\xfe\x00",
    "tabs": "a:\n\t- b",
    "deep": "[" * 20_000,
    "no mapping": "- just\n- a list\n",
    "unknown kind": "apiVersion: loraplane.dev/v1alpha1\nkind: Nothing\nmetadata: {name: pirate}\n",
    "invalid spec": yaml.safe_dump(adapter_manifest(source={"uri": "s3://bucket/x"})),
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("restarted", [False, True])
def test_file_that_breaks_keeps_its_objects(local: Local, case: str, restarted: bool) -> None:
    local.write("a.yaml", adapter_manifest(), adapter_manifest("json"))
    local.write("b.yaml", pool_manifest())
    local.settle()
    broken = BROKEN[case]
    (local.root / "a.yaml").write_bytes(broken if isinstance(broken, bytes) else broken.encode())
    if restarted:
        local.open()
    (problem,) = local.settle()
    assert problem.path == "a.yaml"
    assert "pirate" in local.names()
    assert "deletionTimestamp" not in local.json()["metadata"]
    local.write("a.yaml", adapter_manifest(warmReplicas=2))
    assert local.settle() == []
    assert local.names() == {"pirate", "pool"}
    assert local.json()["spec"]["warmReplicas"] == 2


def test_half_written_file_does_not_count(local: Local) -> None:
    local.write("a.yaml", adapter_manifest())
    local.settle()
    uid = local.json()["metadata"]["uid"]
    (local.root / "a.yaml").write_text("")
    local.store.merge(local.folder.scan())
    local.write("a.yaml", adapter_manifest())
    local.settle()
    assert local.json()["metadata"]["uid"] == uid


def test_moved_document_is_the_same_object(local: Local) -> None:
    local.write("a.yaml", adapter_manifest())
    local.settle()
    uid = local.json()["metadata"]["uid"]
    (local.root / "a.yaml").rename(local.root / "b.yaml")
    local.settle()
    assert local.json()["metadata"]["uid"] == uid


def test_odd_entries_of_the_folder_hold_up_no_other_file(local: Local) -> None:
    os.mkfifo(local.root / "fifo.yaml")
    (local.root / "folder.yaml").mkdir()
    (local.root / "endless.yaml").symlink_to("/dev/zero")
    (local.root / "nothing.yaml").symlink_to("missing")
    (local.root / "loop.yaml").symlink_to("loop.yaml")
    local.write("a.yaml", adapter_manifest())
    (problem,) = local.settle()
    assert problem.path == "loop.yaml"
    assert local.names() == {"pirate"}


def test_folder_that_is_away_deletes_nothing(local: Local) -> None:
    local.write("a.yaml", adapter_manifest())
    local.settle()
    local.root.rename(local.root.with_name("away"))
    (problem,) = local.settle()
    assert "nothing is deleted" in problem.message
    assert local.names() == {"pirate"}


def test_removal_waits_for_the_finalizer(local: Local) -> None:
    local.write("a.yaml", adapter_manifest(), adapter_manifest("json"))
    local.settle()
    uid = local.json()["metadata"]["uid"]
    local.store.set_finalizer(PIRATE, uid, True)
    (local.root / "a.yaml").unlink()
    local.settle()
    assert local.json()["metadata"]["finalizers"] == [FINALIZER]
    assert local.json()["metadata"]["deletionTimestamp"]
    assert local.names() == {"pirate"}  # the other had no finalizer
    local.store.set_finalizer(PIRATE, uid, False)
    assert local.names() == set()


def test_name_wished_again_during_deletion_becomes_a_new_object(local: Local) -> None:
    local.write("a.yaml", adapter_manifest())
    local.settle()
    uid = local.json()["metadata"]["uid"]
    local.store.set_finalizer(PIRATE, uid, True)
    (local.root / "a.yaml").unlink()
    local.settle()
    local.write("a.yaml", adapter_manifest(warmReplicas=2))
    local.settle()
    assert local.json()["metadata"]["uid"] == uid
    local.store.set_finalizer(PIRATE, uid, False)
    local.settle()
    assert local.json()["metadata"]["uid"] != uid
    assert local.json()["metadata"]["generation"] == 1
    assert not local.store.set_status(PIRATE, uid, {"version": 9})


def test_first_file_by_path_wins_a_duplicate(local: Local) -> None:
    local.write("b.yaml", adapter_manifest(warmReplicas=2))
    local.write("a.yaml", adapter_manifest(warmReplicas=1))
    (problem,) = local.settle()
    assert (problem.path, "a.yaml, which wins" in problem.message) == ("b.yaml", True)
    assert local.json()["spec"]["warmReplicas"] == 1


def test_edit_of_an_immutable_field_is_refused_and_the_old_spec_stays(local: Local) -> None:
    local.write("a.yaml", adapter_manifest())
    local.settle()
    local.write("a.yaml", adapter_manifest(tenant="globex"))
    (problem,) = local.settle()
    assert "spec.tenant is immutable" in problem.message
    assert local.json()["spec"]["tenant"] == "acme"


def test_unreadable_state_stops_the_start(local: Local) -> None:
    local.write("a.yaml", adapter_manifest())
    local.settle()
    (local.state / "loraadapter/default/pirate.json").write_text("{}")
    with pytest.raises(ValueError, match="not an object of this release"):
        local.open()


def test_events_are_bounded_and_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "KEPT", 5)
    monkeypatch.setattr(events, "_SLACK", 2)
    log = EventLog(tmp_path / "events.jsonl")
    for number in range(20):
        for _ in range(2):
            log.add(Note(PIRATE, "u", "Normal", "Ready", f"{number}"), "t")
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert len(lines) <= 7
    assert [json.loads(line)["message"] for line in lines[-2:]] == ["18", "19"]
