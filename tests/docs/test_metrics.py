"""Metrics that a document names are ones that a process tells."""

import re

from tests.docs.blocks import ROOT, documents

_NAMED = re.compile(r"`loraplane_(gateway|registry|operator|engine)_(\w+)`")
#: Where each component's metrics are made; an engine's have their prefix from a constant.
_MADE_IN = {
    "gateway": "gateway/loraplane_gateway/data/metrics.py",
    "registry": "gateway/loraplane_gateway/registry/metrics.py",
    "operator": "operator/loraplane_operator/metrics.py",
    "engine": "engine/loraplane_engine/server/metrics.py",
}


def test_metrics_that_are_named_are_made() -> None:
    text = "".join(file.read_text() for file in documents())
    named = {(match[1], match[2]) for match in _NAMED.finditer(text)}
    assert {component for component, _ in named} == set(_MADE_IN)
    assert {name for name in named if not _is_made(*name)} == set()


def _is_made(component: str, name: str) -> bool:
    """prometheus_client adds `_total` to the name of a counter that lacks it."""
    made = rf'"(loraplane_{component}_|{{PREFIX}}|){name.removesuffix("_total")}(_total)?"'
    return re.search(made, (ROOT / _MADE_IN[component]).read_text()) is not None
