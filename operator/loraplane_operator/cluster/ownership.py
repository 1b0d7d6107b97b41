"""Which part of an object's status is this operator's, as the API server keeps it in managedFields.

The planner compares what it wishes with what it wrote. A condition that another controller added must not
look like a difference: the operator would write for ever, and each write would be no change.
"""

import json
from collections.abc import Mapping
from typing import Any

from loraplane_core.labels import FIELD_MANAGER


def owned_status(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The whole status where nobody keeps managedFields."""
    status = raw.get("status") or {}
    entries = (raw.get("metadata") or {}).get("managedFields")
    if entries is None:
        return dict(status)
    for entry in entries:
        mine = entry.get("manager") == FIELD_MANAGER and entry.get("operation") == "Apply"
        if mine and entry.get("subresource") == "status":
            owned = _project(status, (entry.get("fieldsV1") or {}).get("f:status") or {})
            return owned if isinstance(owned, dict) else {}
    return {}


def _project(value: Any, fields: Mapping[str, Any]) -> Any:
    """`value` down to `fields` (the FieldsV1 format). A leaf owns all below it."""
    if not fields.keys() - {"."}:
        return value
    if isinstance(value, dict):
        named = {key.removeprefix("f:"): below for key, below in fields.items() if key.startswith("f:")}
        return {key: _project(item, named[key]) for key, item in value.items() if key in named}
    if isinstance(value, list):
        keys = {key: below for key, below in fields.items() if key.startswith("k:")}
        if keys:
            return [_project(item, below) for item in value if (below := _match(item, keys)) is not None]
    return value


def _match(item: Any, keys: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any] | None:
    for key, below in keys.items():
        wanted = json.loads(key.removeprefix("k:"))
        if isinstance(item, dict) and all(item.get(name) == value for name, value in wanted.items()):
            return below
    return None
