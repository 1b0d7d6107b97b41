"""What a pod's processes read from mounted files: settings with passwords, and the keys of the roles."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from loraplane_core.credentials import new_master, role_key
from loraplane_gateway.__main__ import main
from loraplane_gateway.data.settings import DataSettings
from loraplane_gateway.secret_files import SECRETS_DIR, secret_files
from loraplane_gateway.settings import RegistrySettings

URL = "postgresql://someone:canary@db:5432/loraplane"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As the kubelet mounts a Secret: each entry is a link into a folder of this version."""
    made = tmp_path / "settings"
    (made / "..2026").mkdir(parents=True)
    (made / "..data").symlink_to("..2026")
    for name, text in {"LORAPLANE_DATABASE_URL": URL, "LORAPLANE_REDIS_URL": "redis://:canary@valkey:6379/0\n"}.items():
        (made / "..2026" / name).write_text(text)
        (made / name).symlink_to(f"..data/{name}")
    for variable in ("LORAPLANE_DATABASE_URL", "LORAPLANE_REDIS_URL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(SECRETS_DIR, str(made))
    return made


def key_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for number, name in enumerate(names):
        (tmp_path / name).write_text(f"{number + 1:064x}")
        monkeypatch.setenv(f"LORAPLANE_{name.upper()}", str(tmp_path / name))


def test_data_gateway_reads_urls_from_files(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key_files(tmp_path, monkeypatch, "key_pepper_file", "data_key_file", "state_key_file")
    monkeypatch.setenv("LORAPLANE_ENDPOINTS_DIR", str(tmp_path))
    settings = DataSettings(**secret_files())
    assert settings.database_url.get_secret_value() == URL
    assert settings.redis_url is not None
    assert settings.redis_url.get_secret_value() == "redis://:canary@valkey:6379/0"
    assert "canary" not in repr(settings)


def test_registry_reads_urls_from_files_and_a_variable_wins(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key_files(tmp_path, monkeypatch, "master_key_file", "key_pepper_file", "admin_key_file")
    monkeypatch.setenv("LORAPLANE_ADAPTER_ROOT", str(tmp_path))
    monkeypatch.setenv("LORAPLANE_STORE_DIR", str(tmp_path))
    assert RegistrySettings(**secret_files()).database_url.get_secret_value() == URL
    monkeypatch.setenv("LORAPLANE_DATABASE_URL", "postgresql://db/other")
    assert RegistrySettings(**secret_files()).database_url.get_secret_value() == "postgresql://db/other"


def test_without_the_folder_nothing_is_read_from_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRETS_DIR)
    with pytest.raises(ValidationError, match="database_url"):
        DataSettings(**secret_files())


def test_role_keys_are_those_of_the_master_and_private(tmp_path: Path) -> None:
    master = new_master()
    (tmp_path / "master.key").write_text(master.hex() + "\n")
    into = tmp_path / "roles"
    into.mkdir()
    arguments = ["role-keys", "--master-key-file", str(tmp_path / "master.key"), "--into", str(into)]
    assert main(arguments) == 0
    assert main(arguments) == 0  # an init container may run again
    assert {file.name: file.read_text() for file in into.iterdir()} == {
        "data.key": role_key(master, "data").hex(),
        "state.key": role_key(master, "state").hex(),
    }
    assert {file.stat().st_mode & 0o777 for file in into.iterdir()} == {0o600}


def test_role_keys_of_no_master_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "master.key").write_text("short")
    assert main(["role-keys", "--master-key-file", str(tmp_path / "master.key"), "--into", str(tmp_path)]) == 2
    assert "holds no hexadecimal key" in capsys.readouterr().err


def test_owner_url_comes_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr("loraplane_gateway.db.wait.until_it_answers", lambda *_: None)
    monkeypatch.setattr("loraplane_gateway.db.migrate.migrate", seen.append)
    (tmp_path / "owner-url").write_text(URL + "\n")
    assert main(["migrate", "--owner-url-file", str(tmp_path / "owner-url")]) == 0
    assert seen == [URL]


def test_settings_that_are_refused_are_told_a_line_each_without_what_was_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LORAPLANE_DATABASE_URL", "mysql://u:hidden@db/x")
    monkeypatch.setenv("LORAPLANE_MAX_IN_FLIGHT", "many-hidden")
    assert main(["data"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("loraplane-gateway data: ") for line in lines)
    assert any("LORAPLANE_MAX_IN_FLIGHT: Input should be a valid integer" in line for line in lines)
    assert "hidden" not in "".join(lines)
