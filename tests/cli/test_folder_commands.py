"""`apply`, `delete`, `get`, `events`, `logs`: over the watched folder and the objects an operator stores."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from loraplane_cli.supervisor.layout import StateFolder
from loraplane_cli.supervisor.record import ProcessRecord, Run
from tests.cli.registry_fake import Command

POOL = {
    "apiVersion": "loraplane.dev/v1alpha1",
    "kind": "BaseModelPool",
    "metadata": {"name": "smol", "namespace": "default"},
    "spec": {"baseModel": {"name": "base", "uri": "file:base"}, "replicas": 2},
}
LORA = {
    "apiVersion": "loraplane.dev/v1alpha1",
    "kind": "LoRAAdapter",
    "metadata": {"name": "pirate", "namespace": "default"},
    "spec": {"tenant": "acme", "poolRef": {"name": "smol"}, "source": {"uri": "file:pirate"}},
}
TENANT = {"apiVersion": "loraplane.dev/v1alpha1", "kind": "Tenant", "metadata": {"name": "acme"}}


class Here:
    """A state folder on which a supervisor (this process) seems to run."""

    def __init__(self, base: Path) -> None:
        self.state = StateFolder.of(base / "state")
        self.folder = base / "objects"
        self.source = base / "given.yaml"
        self.folder.mkdir()
        self.state.root.mkdir()
        me = ProcessRecord.of("supervisor", os.getpid())
        self.state.run.write_bytes(msgspec.json.encode(Run(token="t", supervisor=me, folder=str(self.folder))))
        self.command = Command(self.state.root)

    def give(self, *documents: dict[str, Any]) -> str:
        self.source.write_text(yaml.safe_dump_all(documents))
        return str(self.source)

    def store(self, document: dict[str, Any], **status: Any) -> None:
        """As the operator stores an object."""
        meta = {"generation": 1, "creationTimestamp": "2026-11-30T00:00:00Z"} | document["metadata"]
        path = self.state.objects / document["kind"].lower() / meta["namespace"] / f"{meta['name']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document | {"metadata": meta, "status": status}))

    def documents(self) -> dict[str, Any]:
        found = {}
        for path in sorted(self.folder.rglob("*.yaml")):
            for document in yaml.safe_load_all(path.read_text()):
                found[document["metadata"]["name"]] = document
        return found


@pytest.fixture
def here(tmp_path: Path) -> Here:
    return Here(tmp_path)


def test_apply_creates_then_changes_then_leaves_alone(here: Here) -> None:
    source = here.give(POOL, LORA, TENANT)
    outcomes = [item["outcome"] for item in here.command.json("apply", "-f", source)["items"]]
    assert outcomes == ["created"] * 3
    assert here.documents()["pirate"] == LORA
    changed = LORA | {"spec": LORA["spec"] | {"warmReplicas": 2}}  # type: ignore[operator]
    items = here.command.json("apply", "-f", here.give(POOL, changed, TENANT))["items"]
    assert {item["name"]: item["outcome"] for item in items} == {
        "smol": "unchanged",
        "pirate": "configured",
        "acme": "unchanged",
    }
    assert here.documents()["pirate"]["spec"]["warmReplicas"] == 2


def test_apply_replaces_a_document_in_the_file_it_is_in(here: Here) -> None:
    file = here.folder / "mine.yaml"
    file.write_text(yaml.safe_dump_all([POOL, LORA]))
    changed = POOL | {"spec": POOL["spec"] | {"replicas": 1}}  # type: ignore[operator]
    assert here.command.run("apply", "-f", here.give(changed)) == 0
    assert [path.name for path in here.folder.rglob("*.yaml")] == ["mine.yaml"]
    assert here.documents() == {"smol": changed, "pirate": LORA}


def test_apply_of_a_bad_document_changes_nothing_and_names_the_field(
    here: Here, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = LORA | {"spec": LORA["spec"] | {"warmReplicas": "two"}}  # type: ignore[operator]
    assert here.command.run("apply", "-f", here.give(POOL, bad)) == 6
    told = capsys.readouterr().err
    assert "document 1" in told
    assert "warmReplicas" in told
    assert here.documents() == {}


def test_apply_refuses_one_object_given_twice(here: Here) -> None:
    assert here.command.run("apply", "-f", here.give(POOL, POOL)) == 6


def test_apply_without_a_running_up_says_so(here: Here) -> None:
    here.state.run.unlink()
    assert here.command.run("apply", "-f", here.give(POOL)) == 4


def test_delete_takes_the_document_out_and_keeps_its_neighbours(here: Here) -> None:
    (here.folder / "mine.yaml").write_text(yaml.safe_dump_all([POOL, LORA]))
    assert here.command.run("delete", "adapter", "pirate") == 0
    assert here.documents() == {"smol": POOL}
    assert here.command.run("delete", "pool", "smol") == 0
    assert list(here.folder.iterdir()) == []
    assert here.command.run("delete", "pool", "smol") == 1


def test_get_shows_the_columns_of_the_design(here: Here) -> None:
    ready = {"type": "Ready", "status": "True", "reason": "Ready", "message": "serves"}
    here.store(
        LORA,
        conditions=[ready],
        baseModel="base",
        activeVersion=3,
        resident="1/1",
        rank=8,
        digest="ab" * 32,
        replicas=[{"name": "default/smol/1", "residency": "device"}],
    )
    assert here.command.run("get", "lora") == 0
    heading, row = (line.split() for line in here.command.output.splitlines())
    assert heading == ["NAME", "TENANT", "BASE", "VERSION", "READY", "RESIDENT", "RANK", "REASON", "AGE"]
    assert row[:8] == ["pirate", "acme", "base", "3", "True", "1/1", "8", "Ready"]
    assert here.command.run("get", "adapters", "pirate", "-o", "wide") == 0
    assert "1:device" in here.command.output
    assert "abababababab" in here.command.output
    assert here.command.json("get", "lora", "pirate")["status"]["activeVersion"] == 3
    assert here.command.run("get", "lora", "pirate", "-o", "yaml") == 0
    assert yaml.safe_load(here.command.output)["spec"]["tenant"] == "acme"


def test_get_filters_by_namespace_and_says_when_there_is_none(here: Here) -> None:
    here.store(POOL, conditions=[])
    assert [item["kind"] for item in here.command.json("get", "pools", "-n", "default")["items"]] == ["BaseModelPool"]
    assert here.command.json("get", "bmp", "-n", "other")["items"] == []
    assert here.command.run("get", "pools", "none") == 1
    assert here.command.run("get", "pods") == 1
    assert here.command.run("get", "pools", "../secrets") == 1


def test_what_an_ended_run_reported_is_called_that(here: Here) -> None:
    here.store(LORA, conditions=[])
    for words in (("get",), ("top",)):
        assert here.command.run(*words) == 0
        assert here.command.errors == ""
    here.state.run.unlink()
    for words in (("get",), ("top",)):
        assert here.command.run(*words) == 0  # `top` ends by itself: this is no terminal
        assert "no `loraplane up` runs" in here.command.errors
        assert "pirate" in here.command.output


def test_events_are_those_of_the_object_asked_for(here: Here) -> None:
    for name in ("pirate", "json"):
        event = {"time": "2026-11-30T00:00:00Z", "type": "Normal", "reason": "Ready", "message": f"{name} serves"}
        event["object"] = {"kind": "LoRAAdapter", "namespace": "default", "name": name}  # type: ignore[assignment]
        with here.state.events.open("a") as file:
            file.write(json.dumps(event) + "\n")
    assert [item["message"] for item in here.command.json("events", "pirate")["items"]] == ["pirate serves"]
    assert here.command.run("events") == 0
    assert len(here.command.output.splitlines()) == 3


def test_logs_lists_names_and_shows_the_end_of_one(here: Here) -> None:
    here.state.logs.mkdir()
    here.state.log("registry").write_text("".join(f"line {number}\n" for number in range(100)))
    assert here.command.json("logs")["items"][0]["name"] == "registry"
    assert here.command.json("logs", "registry", "-n", "2")["lines"] == ["line 98", "line 99"]
    assert here.command.run("logs", "nobody") == 1
