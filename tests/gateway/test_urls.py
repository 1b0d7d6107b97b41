"""A URL that its password breaks is refused, and no piece of the password is told by any of the processes."""

from pathlib import Path

import pytest
from pydantic import ValidationError
from redis.asyncio import Redis

from loraplane_gateway.__main__ import main
from loraplane_gateway.data.settings import DataSettings
from loraplane_gateway.db.engine import driver_url
from loraplane_gateway.settings import RegistrySettings
from loraplane_gateway.urls import REDIS_FORM, REDIS_SCHEMES, check_url

PIECE = "canarypiece"
#: What a generator of passwords may put among letters and digits.
BROKEN = [f"{PIECE}{character}{PIECE}" for character in "/?#@[]"] + [
    f"1/{PIECE}",
    f"{PIECE}:1/2",
    f"{PIECE}%",
    f"%zz{PIECE}",
]


@pytest.fixture
def key(tmp_path: Path) -> Path:
    file = tmp_path / "key"
    file.write_text("ab" * 32)
    return file


@pytest.mark.parametrize("password", BROKEN)
def test_a_password_that_breaks_its_url_is_not_told(
    password: str, key: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    database, redis = f"postgresql://user:{password}@db:5432/loraplane", f"redis://:{password}@valkey:6379/0"
    monkeypatch.setenv("LORAPLANE_OWNER_URL", database)
    assert main(["migrate"]) == 2
    told = [capsys.readouterr().err]
    given = {
        "DATABASE_URL": database,
        "REDIS_URL": redis,
        "ADAPTER_ROOT": str(key.parent),
        "STORE_DIR": str(key.parent),
    }
    for name in ("MASTER_KEY_FILE", "KEY_PEPPER_FILE", "ADMIN_KEY_FILE", "DATA_KEY_FILE", "STATE_KEY_FILE"):
        given[name] = str(key)
    for name, value in given.items():
        monkeypatch.setenv(f"LORAPLANE_{name}", value)
    for settings in (DataSettings, RegistrySettings):
        with pytest.raises(ValidationError) as refused:
            settings.model_validate({})
        named = {error["loc"][0]: error["msg"] for error in refused.value.errors(include_input=False)}
        assert {"database_url", "redis_url"} <= named.keys()
        told += [str(refused.value), *named.values()]
    assert main(["registry"]) == 2
    told.append(capsys.readouterr().err)
    assert all("write what is neither a letter nor a digit as %XX" in text for text in (told[0], told[-1]))
    assert [text for text in told if PIECE in text] == []


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:p%2Fq%25@db:5432/loraplane",
        "postgresql://user:pa-ss.wo_rd~@[::1]:5432/loraplane?sslmode=require",
        "postgresql://user:password@/loraplane?host=/tmp",
        "postgresql://db/loraplane",
    ],
)
def test_a_url_in_its_form_is_taken(url: str) -> None:
    assert driver_url(url).database == "loraplane"


@pytest.mark.parametrize("url", ["redis://valkey", "rediss://user:p%2Fq@valkey:6380/1", "unix:///run/valkey?db=1"])
def test_a_url_of_valkey_in_its_form_is_taken(url: str) -> None:
    check_url(url, REDIS_SCHEMES, REDIS_FORM)
    assert Redis.from_url(url) is not None
