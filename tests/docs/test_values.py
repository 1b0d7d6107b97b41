"""The values and objects that the pages show are taken; by the API server, too: tests/cluster/test_docs_values.py."""

from pathlib import Path

import pytest

from loraplane_core.resources.documents import parse_document
from tests.charts.helm import template
from tests.docs.blocks import Block, documents, read

YAML = [block for file in documents() for block in read(file) if block.language == "yaml"]


@pytest.mark.parametrize("block", [block for block in YAML if block.marker == "values"], ids=str)
def test_values_that_are_shown_are_taken(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(block.text)
    assert "kind: Deployment" in template(file)


@pytest.mark.parametrize("block", [block for block in YAML if block.marker == "object"], ids=str)
def test_objects_that_are_shown_are_ones(block: Block) -> None:
    import yaml

    for raw in yaml.safe_load_all(block.text):
        parse_document(raw, where=str(block))
