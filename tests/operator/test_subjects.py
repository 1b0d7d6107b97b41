"""Every action is told with the object it is about, and every line of the log is JSON."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from loraplane_core.identity import AdapterId, ReplicaId
from loraplane_core.wire.registry import ClaimRequest, Warmed
from loraplane_operator.actions import (
    Action,
    ClaimAdapter,
    ConfirmWarm,
    DeleteWorkload,
    ReleaseClaim,
    RemoveReport,
    RestartReplica,
    SetFinalizer,
    Warm,
    WorkloadSpec,
)
from loraplane_operator.subjects import Subjects
from tests.operator.worlds import POOL, adapter, pool

PIRATE, HOME = "LoRAAdapter/default/pirate", "BaseModelPool/default/pool"
ID = AdapterId("acme", "pirate", 1, "d" * 64)
CLAIM = ClaimRequest(tenant="acme", adapter="pirate", ref="default/pirate", pool="default/pool")
SPEC = WorkloadSpec(POOL, uid="uid-pool", replicas=1, engine=(), epoch=1, revision="r1")


def warm(id_: AdapterId = ID) -> Warm:
    return Warm(ReplicaId(*POOL, 0), "boot", id_, bytes=1, rank=8, pinned=False, drift=False, why="")


@pytest.fixture
def subjects() -> Subjects:
    made = Subjects()
    made.learn([pool()], [adapter()])
    return made


@pytest.mark.parametrize(
    ("action", "told"),
    [
        (RestartReplica(SPEC, 0, why=""), HOME),
        (DeleteWorkload(POOL, why=""), HOME),
        (RemoveReport(POOL, why=""), HOME),
        (ClaimAdapter("uid-pirate", CLAIM, why=""), PIRATE),
        (ReleaseClaim("uid-pirate", "retain", why=""), PIRATE),
        (SetFinalizer(adapter().meta.ref, "uid-pirate", present=True, why=""), PIRATE),
        (warm(), PIRATE),
        (ConfirmWarm("acme", "pirate", Warmed(version=1, digest=ID.digest), why=""), PIRATE),
    ],
    ids=lambda each: type(each).__name__ if not isinstance(each, str) else "",
)
def test_action_is_told_with_its_object(subjects: Subjects, action: Action, told: str) -> None:
    assert subjects.of(action)["object"] == told


def test_what_belongs_to_no_object_is_told_by_what_it_names(subjects: Subjects) -> None:
    assert subjects.of(ReleaseClaim("uid-gone", "retain", why="")) == {"uid": "uid-gone"}
    stranger = AdapterId("acme", "by-rest", 1, "d" * 64)
    assert subjects.of(warm(stranger)) == {"replica": "default/pool/0", "adapter": str(stranger)}


def test_of_two_objects_for_one_adapter_the_older_is_told(subjects: Subjects) -> None:
    second = adapter("second", adapter="pirate")
    younger = replace(second, meta=replace(second.meta, created_at=second.meta.created_at + 1))
    for order in ([younger, adapter()], [adapter(), younger]):
        subjects.learn([], order)
        assert subjects.of(warm())["object"] == PIRATE


_SAYS = """
import logging, warnings
from loraplane_operator import logs
logs.configure()
warnings.warn("an odd thing")
try:
    raise RuntimeError("two\\nlines")
except RuntimeError:
    logging.getLogger("loraplane_operator").exception("broke", extra={"phase": "plan", "object": "LoRAAdapter/a/b"})
"""


def test_warnings_and_tracebacks_are_json_lines_too() -> None:
    done = subprocess.run([sys.executable, "-c", _SAYS], capture_output=True, text=True, timeout=20, check=True)
    first, second = (json.loads(line) for line in done.stderr.splitlines())
    assert "an odd thing" in first["message"] and first["level"] == "warning"
    assert (second["phase"], second["object"]) == ("plan", "LoRAAdapter/a/b")
    assert "two\nlines" in second["exception"]
