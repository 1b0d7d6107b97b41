"""The form of API keys."""

import re

from hypothesis import given
from hypothesis import strategies as st

from loraplane_gateway import keys


def test_a_minted_key_has_the_form_and_names_its_id() -> None:
    key_id, key = keys.mint()
    assert re.fullmatch(r"lp_[0-9A-Za-z]{12}_[0-9A-Za-z]{38}", key)
    assert keys.key_id(key) == key_id
    assert keys.mint()[1] != key


@given(position=st.integers(0, 53), char=st.sampled_from(keys.ALPHABET))
def test_any_one_wrong_character_is_noticed_without_a_look_up(position: int, char: str) -> None:
    _, key = keys.mint()
    wrong = key[:position] + char + key[position + 1 :]
    assert (keys.key_id(wrong) is None) == (wrong != key)


def test_other_texts_are_no_keys() -> None:
    _, key = keys.mint()
    for text in ("", "lp_", key[:-1], key + "a", key.upper(), f" {key}", f"{key}\n", key.replace("_", "-")):
        assert keys.key_id(text) is None


def test_the_digest_depends_on_the_pepper() -> None:
    _, key = keys.mint()
    assert len(keys.digest(b"a" * 32, key)) == 32
    assert keys.digest(b"a" * 32, key) != keys.digest(b"b" * 32, key)
