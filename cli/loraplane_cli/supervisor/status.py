"""What the supervisor tells about itself: one file, replaced whenever something changed."""

import contextlib
from typing import Literal

import msgspec

from loraplane_cli.supervisor.layout import StateFolder
from loraplane_core.files import write_atomic
from loraplane_core.wire.supervisor import WorkloadStatus

RunPhase = Literal["starting", "running", "stopping", "failed"]


class PartStatus(msgspec.Struct, kw_only=True, frozen=True):
    name: str
    phase: str
    pid: int
    restarts: int
    message: str = ""


class SupervisorStatus(msgspec.Struct, kw_only=True, frozen=True):
    phase: RunPhase
    pid: int
    folder: str
    message: str = ""
    parts: list[PartStatus] = []
    workloads: list[WorkloadStatus] = []
    notes: list[str] = []  # what a person should be told, for example a port that had to move


def write_status(state: StateFolder, status: SupervisorStatus) -> None:
    write_atomic(state.status, msgspec.json.encode(status), 0o600)


def read_status(state: StateFolder) -> SupervisorStatus | None:
    with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
        return msgspec.json.decode(state.status.read_bytes(), type=SupervisorStatus)
    return None
