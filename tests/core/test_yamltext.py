"""YAML of people: what is read, and that nothing in it costs its reader more than a refusal."""

import pytest

from loraplane_core.resources.yamltext import BadYaml, load_yaml


def _aliases(form: str, levels: int) -> str:
    lines = ["a: &a {x: 1}" if "<<" in form else "a: &a [x, x]"]
    for level in range(levels):
        name, above = chr(98 + level), chr(97 + level)
        lines.append(f"{name}: &{name} " + form.format(", ".join([f"*{above}"] * 9)))
    return "\n".join(lines)


def test_documents_with_anchors_aliases_and_merges_are_read() -> None:
    text = "a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}\n---\n---\na: &a [1]\nb: [*a, *a]\n"
    assert load_yaml(text) == [
        {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1, "y": 2}},
        None,
        {"a": [1], "b": [[1], [1]]},
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "flow"),
        ("[" * 20_000, "deep"),
        ("{a: " * 5000, "deep"),
        ("- " * 5000 + "x", "deep"),
        (_aliases("[{}]", 10), "aliases expanded"),
        (_aliases("{{<<: [{}]}}", 10), "aliases expanded"),
        ("- x\n" * 100_001, "more than"),
        ("a: &a [*a]", "inside"),
        ("a: &a {b: 1, <<: *a}", "inside"),
        ("a: *nobody", "undefined"),
        ("a: 1\nb: 2\na: 3\n", "'a' comes twice"),
        ("a: {b: 1, b: 1}", "'b' comes twice"),
        ("? [a]\n: b", "unhashable"),
        ("a: 2020-99-99", "month"),
        ("a: " + "9" * 6000, "digits"),
        ("a: !!bool maybe", "maybe"),
        ("a: !!int ''", ""),
        ("a: !!timestamp soon", ""),
        ("!!python/object/apply:os.system [true]", "constructor"),
        ("a: \0", "special characters"),
        ("a" * ((4 << 20) + 1), "larger"),
    ],
)
def test_what_is_not_a_document_of_ours_is_refused_with_a_reason(text: str, words: str) -> None:
    with pytest.raises(BadYaml) as refused:
        load_yaml(text)
    assert words in str(refused.value)
