"""Credentials derive from the master one way only."""

from pathlib import Path

import pytest

from loraplane_core import credentials
from loraplane_core.credentials import ROLES, accepted, bearer, engine_credential, operator_credential, role_key
from loraplane_core.identity import PoolRef

MASTER = bytes(range(32))
POOL = PoolRef("default", "smol")


def test_every_role_pool_epoch_and_master_has_its_own_credential() -> None:
    found = {
        engine_credential(role_key(master, role), pool, epoch)
        for master in (MASTER, MASTER[::-1])
        for role in ROLES
        for pool in (POOL, PoolRef("default", "smo"), PoolRef("other", "smol"))
        for epoch in (1, 2, 11)
    } | {operator_credential(MASTER), operator_credential(MASTER[::-1])}
    assert len(found) == 2 * len(ROLES) * 3 * 3 + 2


def test_derivation_is_stable_between_releases() -> None:
    # A change here would lock running engines out of a rolled-out gateway.
    assert engine_credential(role_key(MASTER, "data"), POOL, 1) == (
        "5cc0a2b10e6af460cbbfc2e02a905f7b4344db5415bd4ca534ce8aa572cdb817"
    )


def test_membership_compares_whole_tokens() -> None:
    assert accepted("b", ["a", "b"])
    assert not accepted("", ["a", "b"])
    assert not accepted("a", [])
    assert not accepted("aa", ["a"])
    assert not accepted("é", ["a"])


@pytest.mark.parametrize(
    ("header", "token"),
    [
        ("Bearer abc", "abc"),
        ("bearer  abc ", "abc"),
        ("Bearer ", None),
        ("Bearer", None),
        ("Basic abc", None),
        ("", None),
        (None, None),
    ],
)
def test_the_token_of_a_header(header: str | None, token: str | None) -> None:
    assert bearer(header) == token


def test_keys_are_read_from_files(tmp_path: Path) -> None:
    path = tmp_path / "key"
    key = credentials.new_master()
    path.write_text(key.hex() + "\n")
    assert credentials.read_key(path) == key
    assert credentials.new_master() != key


@pytest.mark.parametrize("content", ["", "zz", "00" * 31, "0" * 65])
def test_a_short_or_unreadable_key_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(content)
    with pytest.raises(ValueError, match="key"):
        credentials.read_key(path)
    with pytest.raises(ValueError, match="key"):
        credentials.read_key(tmp_path / "missing")
