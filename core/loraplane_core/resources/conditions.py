"""Kubernetes conditions, as the CRDs have them. The operator renders them (plan/conditions.py)."""

from typing import Literal

from pydantic import Field

from loraplane_core.resources.base import Report

ConditionStatus = Literal["True", "False", "Unknown"]
#: The API server's bound is larger; a longer text is no longer read in `kubectl describe`.
MESSAGE_MAX = 1024


class Condition(Report):
    type: str = Field(min_length=1, max_length=63)
    """What is judged, for example Ready."""
    status: ConditionStatus
    """True, False or Unknown."""
    reason: str = Field(pattern=r"^[A-Za-z]([A-Za-z0-9_]*[A-Za-z0-9])?$", max_length=128)
    """The stable reason, one of the documented enum."""
    message: str = Field(default="", max_length=32768)
    """The reason in words, for people."""
    last_transition_time: str = ""
    """RFC 3339 time of the last change of `status`."""
    observed_generation: int = 0
    """The metadata.generation that this was judged on."""
