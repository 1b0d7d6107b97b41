"""In which forms a secret is found, and that nothing else is taken for one."""

import base64
import json
import secrets
from typing import Any

import pytest

from loraplane_core.credentials import operator_credential, role_key
from tests.cluster.leaks import Find, Hunt, without_secrets

HEX = secrets.token_hex(32)
WORD = "correct-horse!battery staple"


def hunt(*values: str) -> Hunt:
    made = Hunt()
    for number, value in enumerate(values):
        made.add(f"secret {number}", value.encode())
    return made


def encoded(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


@pytest.mark.parametrize("value", [HEX, WORD], ids=["digits", "words"])  # the same in each worker
@pytest.mark.parametrize(
    ("form", "wrap"),
    [
        ("as it is", lambda value: f"key={value},"),
        ("as it is", lambda value: value[:16]),
        ("as it is", lambda value: f"…{value[-16:]}"),
        ("base64", lambda value: f"data: {encoded(value)}"),
        *(("base64", lambda value, before=before: encoded(before + value)) for before in ("a", "ab", "abc", "user:")),
    ],
)
def test_a_secret_is_found_in_each_form(value: str, form: str, wrap: Any) -> None:
    assert hunt(value).finds("here", f"some text {wrap(value)}\n") == [Find("here", "secret 0", form)]


@pytest.mark.parametrize("wrap", [encoded, lambda raw: base64.urlsafe_b64encode(raw).decode().rstrip("=")])
def test_the_bytes_that_hexadecimal_digits_stand_for_are_found(wrap: Any) -> None:
    for _ in range(20):  # until there was a + or a / at the front
        key = secrets.token_bytes(32)
        found = hunt(key.hex()).finds("here", wrap(key))
        assert found == [Find("here", "secret 0", "its bytes in base64")]


def test_a_value_that_is_no_text_is_found() -> None:
    value = b"\xff\xfe" + secrets.token_bytes(30)
    made = Hunt()
    made.add("raw", value)
    forms = [find.form for text in (value.hex(), encoded(value)) for find in made.finds("here", text)]
    assert forms == ["its bytes in hexadecimal digits", "its bytes in base64"]


def test_of_a_url_an_api_key_and_an_object_only_what_is_secret_counts() -> None:
    url = f"postgresql://loraplane_registry:{HEX}@loraplane-postgres:5432/loraplane"
    key = f"lp_0123456789ab_{'Secret' * 6}01"
    credentials = json.dumps({"epoch": 3, "data": [secrets.token_hex(32)], "fetch": secrets.token_hex(32)})
    made = hunt(url, key, credentials)
    public = "postgresql://loraplane_registry:…@loraplane-postgres:5432/loraplane, key lp_0123456789ab, epoch 3"
    assert made.finds("here", public) == []
    leaks = [HEX, key, json.loads(credentials)["data"][0], json.loads(credentials)["fetch"]]
    found = [find.secret for leak in leaks for find in made.finds("here", leak)]
    assert found == ["secret 0", "secret 1", "secret 2", "secret 2"]


def test_every_entry_of_a_secret_counts_and_what_the_master_key_makes() -> None:
    master = secrets.token_bytes(32)
    data = {"master.key": encoded(master.hex()), "pepper.key": encoded(HEX)}
    made = Hunt()
    made.add_secret({"metadata": {"namespace": "lp", "name": "keys"}, "data": data, "stringData": {"word": WORD}})
    leaks = [HEX, WORD, operator_credential(master), role_key(master, "admin").hex()]
    assert [find.secret for leak in leaks for find in made.finds("here", leak)] == [
        "Secret lp/keys: pepper.key",
        "Secret lp/keys: word",
        "Secret lp/keys: the operator's credential",
        "Secret lp/keys: the key of role admin",
    ]


def test_a_secret_that_is_too_short_to_look_for_is_refused_without_being_told() -> None:
    with pytest.raises(ValueError, match="secret 0 has fewer than 16 characters") as refused:
        hunt("hunter2")
    assert "hunter2" not in str(refused.value)


def test_other_text_is_no_find() -> None:
    text = "\n".join([secrets.token_hex(32), encoded(secrets.token_bytes(60)), HEX[:15], WORD[:15], "A" * 100])
    assert hunt(HEX, WORD).finds("here", text) == []


def test_only_secrets_are_left_out_of_manifests() -> None:
    manifests = f"""---
# Source: a.yaml
apiVersion: v1
kind: Secret
data: {{ key: {HEX} }}
---
# {HEX[:16]}
kind: ConfigMap
--- # Source: b.yaml
kind: SecretList
"""
    left = without_secrets(manifests)
    assert HEX not in left
    assert f"# {HEX[:16]}" in left
    assert "SecretList" in left
