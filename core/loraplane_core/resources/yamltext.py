"""YAML that people wrote, as plain values. Needs PyYAML, which the extras `operator` and `cli` bring.

A document must not bring down who reads it, so nesting, and the size after aliases are expanded, have
limits; a key that comes twice is refused, because readers disagree about which one counts.
"""

from typing import Any

import yaml

BYTES_MAX = 4 << 20
DEPTH_MAX = 50
NODES_MAX = 100_000


class BadYaml(ValueError):
    """The text is not YAML, or more than a document of ours could need."""


def load_yaml(text: str) -> list[Any]:
    """All documents in `text`, empty ones as None. Raises BadYaml."""
    if len(text) > BYTES_MAX:
        raise BadYaml(f"larger than {BYTES_MAX} bytes")
    try:
        return list(yaml.load_all(text, Loader=_Loader))
    except Exception as error:  # a constructor lets through whatever a conversion raised: KeyError for `!!bool x`
        raise BadYaml(" ".join(str(error).split()) or type(error).__name__) from error


class _Loader(yaml.SafeLoader):
    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0
        self._nodes = 0  # so far, with aliases counted as what they stand for
        self._sizes: dict[str, int] = {}  # of complete anchored nodes, likewise

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        before = self._nodes
        self._depth += 1
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in self.anchors and event.anchor not in self._sizes:
                raise self._refused("an alias stands inside what it stands for", event)
            self._nodes += self._sizes.get(str(event.anchor), 0)
        self._nodes += 1
        if self._depth > DEPTH_MAX:
            raise self._refused(f"nested more than {DEPTH_MAX} deep", event)
        if self._nodes > NODES_MAX:
            raise self._refused(f"more than {NODES_MAX} values, aliases expanded", event)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if not isinstance(event, yaml.AliasEvent) and event.anchor is not None:
            self._sizes[event.anchor] = self._nodes - before
        return node

    def compose_document(self) -> Any:
        self._sizes = {}
        return super().compose_document()

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        if isinstance(node, yaml.MappingNode):
            seen = set()
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                if (key.tag, key.value) in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} comes twice", key.start_mark)
                seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)

    def _refused(self, why: str, event: Any) -> yaml.MarkedYAMLError:
        return yaml.composer.ComposerError(None, None, why, event.start_mark)
