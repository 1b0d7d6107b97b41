"""The command line: what is understood, and what stops the start with status 2."""

import json
from pathlib import Path

import pytest

from loraplane_engine.settings import SettingsError, parse, parse_quantity
from tests.engine.server.world import managed


@pytest.mark.parametrize(
    ("text", "value"),
    [("64Mi", 64 << 20), ("1.5Gi", 3 << 29), ("2k", 2000), ("123", 123), ("1T", 10**12)],
)
def test_quantities(text: str, value: int) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize("text", ["", "64MB", "-1", "1e3", "Mi", "nan"])
def test_bad_quantities(text: str) -> None:
    with pytest.raises(SettingsError):
        parse_quantity(text)


def test_the_base_is_named_after_its_folder(model: Path) -> None:
    settings = parse(["--model", str(model) + "/"])
    assert (settings.served_name, settings.host, settings.admin_port) == ("tiny", "127.0.0.1", None)
    assert settings.core.model == str(model)


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        parse(arguments)
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_case_e11_an_adapter_named_like_the_base_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "base model has this name" in refused(["--model", str(model), "--adapter", f"tiny={tmp_path}"], capsys)
    message = refused(["--model", str(model), "--served-name", "x", "--adapter", f"x={tmp_path}"], capsys)
    assert "base model has this name" in message


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_without_credentials_only_loopback_is_bound(model: Path, host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "not a loopback address" in refused(["--model", str(model), "--host", host], capsys)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_loopback_needs_no_credentials(model: Path, host: str) -> None:
    assert parse(["--model", str(model), "--host", host]).host == host


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--model", "/nowhere"], "no config.json"),
        (["--max-sequences", "0"], "--max-sequences"),
        (["--device-memory", "lots"], "not a quantity"),
        (["--adapter", "nodir"], "NAME=DIR"),
        (["--adapter", "Bad=/tmp"], "DNS label"),
        (["--adapter", "a=/nowhere"], "not a folder"),
        (["--adapter", "a=/", "--adapter", "a=/"], "twice"),
        (["--replica", "a/b/0"], "needs --credentials"),
        (["--dtype", "int4"], "invalid choice"),
    ],
)
def test_bad_values_stop_the_start(
    model: Path, arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert part in refused(["--model", str(model), *arguments], capsys)


def credentials(folder: Path, mode: int = 0o600, **changes: object) -> Path:
    path = folder / "credentials.json"
    content = {"epoch": 1, "data": ["d"], "state": ["s"], "admin": ["a"], "fetch": "f"} | changes
    path.write_text(json.dumps(content))
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("mode", "changes", "part"),
    [
        (0o644, {}, "read by everyone"),
        (0o600, {"data": []}, "empty token"),
        (0o600, {"admin": [""]}, "empty token"),
        (0o600, {"epoch": "one"}, "unreadable"),
    ],
)
def test_bad_credentials_stop_the_start(
    model: Path, tmp_path: Path, mode: int, changes: dict[str, object], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = credentials(tmp_path, mode, **changes)
    arguments = ["--model", str(model), "--credentials", str(path), "--replica", "a/b/0", "--cache-dir", "/tmp/x"]
    assert part in refused([*arguments, "--artifacts-url", "http://127.0.0.1:1"], capsys)
    assert "needs --artifacts-url" in refused(arguments, capsys)


def test_the_managed_form(model: Path, tmp_path: Path) -> None:
    settings = managed(model, tmp_path, "http://127.0.0.1:1/", "--host", "0.0.0.0", "--slots", "4")
    assert settings.managed is not None
    assert str(settings.managed.replica) == "default/pool/0"
    assert settings.managed.artifacts_url == "http://127.0.0.1:1"
    assert (settings.admin_port, settings.metrics_port, settings.core.slots) == (0, 0, 4)


def test_a_managed_engine_takes_no_local_adapters(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        managed(model, tmp_path, "http://127.0.0.1:1", "--adapter", f"a={tmp_path}")
    assert "standalone" in capsys.readouterr().err
